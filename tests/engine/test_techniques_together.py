"""Every technique beside every other: drawn settings and drawn traffic give each request the tokens that it gets alone
on a plain engine, and leave nothing behind."""

import math
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sojourn.engine.adapter import AdapterReference
from sojourn.engine.compute.cpp.extension import library
from sojourn.engine.loop.engine import Engine
from sojourn.engine.memory.eviction import EVICTION_POLICIES
from sojourn.engine.messages import Abort, Submit
from sojourn.engine.request.policies import POLICIES
from tests.engine.adapters import LINEARS, random_adapter, reference
from tests.engine.harness import drain, hand_over, make_engine, submit
from tests.engine.memory.audits import audit_pool, audit_tiers
from tests.engine.published import Published

MAX_MODEL_LEN = 96
RANKS = {"a0": 4, "a1": 7, "a2": 16}  # of adapters
BEGINNINGS = [
    tuple((37 * place + 11) % 317 + 3 for place in range(70)),
    tuple((91 * place + 5) % 311 + 3 for place in range(70)),
    tuple(40 + place % 5 for place in range(70)),  # for prompt lookup
]
SAMPLING: list[dict[str, Any]] = [
    {}, {"temperature": 1.0, "seed": 1}, {"temperature": 0.8, "top_p": 0.9, "seed": 2},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4}, {"temperature": 0.9, "seed": 3, "lz_penalty": 0.3},
]  # fmt: skip


# In nats. Where a chunk is cut otherwise, float32 adds in another order, and a number between two codes may get the
# other one: of a key, a value, or an activation, which kernels of integer weights round. Then the most probable token
# may be another one that is so near. Without codes nothing of the kind is allowed.
NEAR = {"fp8": 0.3, "int8": 0.1, "int4": 0.6}


def nearness(outputs: dict[str, Any]) -> float:
    return sum(NEAR.get(outputs[setting], 0.0) for setting in ("kv_cache_dtype", "weights"))


class Call(NamedTuple):
    """A request with `choices` that share its prompt: the first one leads, the others fork it."""

    prompt: tuple[int, ...]
    max_tokens: int
    adapter: str | None
    sampling: int  # index of SAMPLING
    choices: int = 1

    def messages(self, name: str, adapters: dict[str, AdapterReference]) -> list[Submit]:
        found, sampling = [], SAMPLING[self.sampling]
        adapter = None if self.adapter is None else adapters[self.adapter]
        for choice in range(self.choices):
            seed = {"seed": sampling["seed"] + 10 * choice} if "seed" in sampling else {}
            message = submit(f"{name}.{choice}", list(self.prompt), self.max_tokens, **(sampling | seed))
            leader = f"{name}.0" if choice else None
            found.append(msgspec.structs.replace(message, adapter=adapter, fork_of=leader))
        return found


class Turn(NamedTuple):
    call: Call
    steps: int | None  # that follow; None: until the engine is idle
    aborts: bool  # the call, after those steps


class Drawn(NamedTuple):
    outputs: dict[str, Any]  # settings that change what a request is answered, by design
    others: dict[str, Any]  # settings that must not
    turns: list[Turn]


@st.composite
def calls(draw: Callable) -> Call:
    """Prompts of few beginnings, so that many are found again."""
    beginning = draw(st.sampled_from(BEGINNINGS))[: draw(st.sampled_from([64, 33, 70, 16, 8, 1]))]
    return Call(
        beginning + (300 + draw(st.integers(0, 1)),) * draw(st.integers(0, 2)),
        max_tokens=draw(st.integers(1, 16)),
        adapter=draw(st.sampled_from([None, *RANKS])),
        sampling=draw(st.integers(0, len(SAMPLING) - 1)),
        choices=draw(st.sampled_from([1, 1, 2, 3])),
    )


# int4 has a kernel of ours alone.
WEIGHTS = ("auto", "int8", "int4") if library() is not None else ("auto",)


@st.composite
def drawn(draw: Callable, family: "Family") -> Drawn:
    """Settings that the engine accepts together, and traffic."""
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    outputs = {"weights": pick(*WEIGHTS), "kv_cache_dtype": pick("auto", "fp8", "int8", "int4")}
    if family.takes_window and (window := pick(None, 20, 7)) is not None:
        outputs |= {"attention_window": window, "attention_sinks": pick(4, 0, 17)}
    others: dict[str, Any] = {
        "speculation": pick("none", "ngram", "early-exit", "draft-model"),
        "overlap": pick("off", "on"),
        "eviction_policy": pick(*EVICTION_POLICIES),
        "policy": pick(*POLICIES),
        "block_size": pick(16, 4, 5),
        "max_num_seqs": pick(8, 3),
        "max_num_batched_tokens": pick(512, 33, 17),
        "max_prefill_chunk_tokens": pick(None, 7),
        "max_loras": pick(8, 2, 1),
        "lora_host_gib": pick(1.0, 2e-4),
        "prefix_caching": pick(True, True, True, False),
    }
    others["num_kv_blocks"] = -(-MAX_MODEL_LEN // others["block_size"]) + pick(400, 1, 4)
    if others["eviction_policy"] == "ttl":
        others["eviction_ttl_seconds"] = pick(60, 1e-3)
    if others["speculation"] != "none":
        others |= {"speculation_tokens": pick(4, 1, 9), "speculation_adaptive": pick("off", "on")}
    if others["speculation"] == "draft-model":
        others["speculation_model"] = str(family.draft)
    tiers = pick("none", "host", "disk") if others["prefix_caching"] else "none"
    if tiers != "none":
        others |= {"kv_store_policy": pick("fill", "evict", "reuse"), "kv_host_gib": pick(1e-3, 2e-4)}
    if tiers == "disk":
        others["kv_disk_gib"] = pick(1e-3, 1e-4)
    is_greedy = nearness(outputs) > 0  # of a draw nobody could say how near it was
    asked = calls().map(lambda call: call._replace(sampling=0) if is_greedy else call)
    turns = st.builds(Turn, asked, st.sampled_from([0, 1, 2, 5, None]), st.sampled_from([False] * 5 + [True]))
    return Drawn(outputs, others, draw(st.lists(turns, min_size=1, max_size=10)))


class Answer(NamedTuple):
    """What a plain engine says, and the most probable tokens of each place with their log-probabilities."""

    tokens: list[int]
    scores: list[dict[int, float]]

    def differs(self, tokens: list[int], near: float) -> str | None:
        """Where the first other token is, if it is not as probable within `near`; behind it all may differ."""
        for place, (expected, token) in enumerate(zip(self.tokens, tokens, strict=False)):
            if expected != token:
                gap = self.scores[place].get(expected, math.inf) - self.scores[place].get(token, -math.inf)
                return None if gap < near else f"place {place}: {token}, not {expected} ({gap:.3f} nats)"
        return None


class Family:
    """A checkpoint with adapters, and what plain engines answer."""

    def __init__(self, model: Path, draft: Path, root: Path, targets: list[str], takes_window: bool):
        self.model, self.draft, self.takes_window = model, draft, takes_window
        self.folders = {
            name: random_adapter(model, root / name, rank, seed, targets)
            for seed, (name, rank) in enumerate(RANKS.items())
        }
        self.adapters = {name: reference(folder) for name, folder in self.folders.items()}
        self._plain: dict[str, tuple[Engine, Published]] = {}
        self._known: dict[tuple[str, Call], list[Answer]] = {}

    def engine(self, **settings: Any) -> tuple[Engine, Published]:
        limits = {"max_model_len": MAX_MODEL_LEN, "lora_adapters": self.folders}
        return make_engine(self.model, **(limits | settings))

    def answers(self, call: Call, outputs: dict[str, Any]) -> list[Answer]:
        """Of each choice alone, without anything that is cached."""
        key = repr(sorted(outputs.items()))
        if (key, call) not in self._known:
            if key not in self._plain:
                self._plain[key] = self.engine(prefix_caching=False, **outputs)
            engine, published = self._plain[key]
            found = []
            for message in call.messages(f"{len(self._known)}", self.adapters):
                sampling = msgspec.structs.replace(message.sampling, logprobs=8)
                hand_over(engine, [msgspec.structs.replace(message, sampling=sampling, fork_of=None)])
                drain(engine)
                scores = [dict(score.top) for score in published.logprobs[message.request_id]]
                found.append(Answer(published.tokens[message.request_id], scores))
            self._known[key, call] = found
        return self._known[key, call]


def check(family: Family, case: Drawn, restarts: bool = False) -> list[Published]:
    """Plays the traffic, and once more on the same disk if the server `restarts`."""
    played = []
    with tempfile.TemporaryDirectory() as folder:
        disk = {"kv_disk_path": folder} if "kv_disk_gib" in case.others else {}
        for _ in range(1 + (restarts and bool(disk))):
            engine, published = family.engine(**case.outputs, **case.others, **disk)
            try:
                aborted = play(engine, case.turns, family)
            finally:
                engine.close()
            assert_exact(family, case, published, aborted)
            assert_nothing_is_left(engine)
            played.append(published)
    return played


def play(engine: Engine, turns: list[Turn], family: Family) -> set[str]:
    """The requests that were aborted, maybe after their end."""
    aborted = set()
    for index, turn in enumerate(turns):
        messages = turn.call.messages(f"r{index}", family.adapters)
        hand_over(engine, messages)
        if turn.steps is None:
            drain(engine, check=True)
        for _ in range(turn.steps or 0):
            step(engine)
        if turn.aborts:
            hand_over(engine, [Abort(message.request_id) for message in messages])
            aborted |= {message.request_id for message in messages}
    drain(engine, check=True)
    return aborted


def step(engine: Engine) -> None:
    engine.receive([], engine.step() if engine.has_work else time.monotonic_ns())
    live = engine.scheduler.requests.values()
    audit_pool(engine.scheduler.pool, [r.blocks for r in live], [r.num_committed_tokens for r in live])


def assert_exact(family: Family, case: Drawn, published: Published, aborted: set[str]) -> None:
    for index, turn in enumerate(case.turns):
        for choice, answer in enumerate(family.answers(turn.call, case.outputs)):
            name = f"r{index}.{choice}"
            ended, tokens = published.ended[name], published.tokens.get(name, [])
            assert ended.reason == "length" or (ended.reason == "abort" and name in aborted), ended
            assert ended.reason == "abort" or len(tokens) == turn.call.max_tokens, name
            assert not (why := answer.differs(tokens, nearness(case.outputs))), f"{name}: {why}"


def assert_nothing_is_left(engine: Engine) -> None:
    scheduler, runner = engine.scheduler, engine.runner
    audit_pool(scheduler.pool, [])
    assert not scheduler.requests and not scheduler.num_waiting and scheduler.pool.counts().active == 0
    assert scheduler.technique("lora").slots.in_use == 0 and not runner.part("lora").host._keys
    assert len(runner.rows) == 0 and not runner.sampler._states
    if scheduler.technique("tiers") is not None:
        audit_tiers(scheduler.technique("tiers").tiers)
        assert not scheduler.technique("tiers").tiers.waits


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
# name → (what adapters change, whether it takes attention_window: those with windows of their own do not)
FAMILIES: dict[str, tuple[list[str], bool]] = {
    "llama": (LINEARS, True),
    "qwen3": (LINEARS, True),
    "mpt": (["Wqkv", "out_proj", "up_proj", "down_proj"], True),
    "deepseek-v3": (["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"], True),
    "mistral": (LINEARS, False),
    "gemma3": (LINEARS, False),
    "gpt-oss": (ATTENTION, False),
    "mixtral": (ATTENTION, False),
}


@pytest.fixture(scope="module")
def family(checkpoints, tmp_path_factory) -> Callable[[str], Family]:
    def made(name: str) -> Family:
        root = tmp_path_factory.mktemp("adapters")
        return Family(checkpoints[name], checkpoints["qwen3"], root, *FAMILIES[name])

    return cache(made)


@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_no_technique_changes_a_token_beside_others(family, data):
    check(family("llama"), data.draw(drawn(family("llama"))))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", FAMILIES)
def test_no_technique_changes_a_token_of_any_family_nor_after_a_restart(family, name):
    @settings(max_examples=100, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def all_cases(data):
        check(family(name), data.draw(drawn(family(name))), restarts=True)

    all_cases()
