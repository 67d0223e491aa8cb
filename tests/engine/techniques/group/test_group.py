"""A group of processes gives the tokens of one process, and its end is the end of all ranks."""

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from sojourn.engine import LLM, SamplingParams
from sojourn.engine.compute.communication.communicator import Communicators
from sojourn.engine.config import EngineConfig, model_folder
from sojourn.engine.techniques.group import group as group_module
from sojourn.engine.techniques.group import messages
from sojourn.engine.techniques.group.group import Group, GroupError, forming
from sojourn.engine.techniques.group.identity import identity
from sojourn.engine.techniques.group.rank_loop import Mailbox
from sojourn.engine.techniques.group.rank_step import BetweenSteps
from sojourn.metrics.compute.communication import group_shape
from sojourn.metrics.compute.startup import StartupClock
from sojourn.metrics.errors import ModelError
from sojourn.metrics.records import ACTIVITIES
from tests.further import further

pytestmark = pytest.mark.server
# Two prompts begin alike, and the pool has room for about two of the requests: some are preempted.
PROMPTS = [list(range(40, 90)), list(range(40, 80)) + [7] * 9, [5] * 30, list(range(200, 245))]
SIZES = {"num_kv_blocks": 14, "max_model_len": 160, "block_size": 16, "threads": 1}
ADAPTERS = {
    "max_loras": 2,  # fewer than the adapters
    "lora_adapters": [f"{name}=tiny-adapters/{name}" for name in ("files", "network", "tests")],
}


def outputs(**settings) -> list[list[int]]:
    greedy, drawn = (
        SamplingParams(max_tokens=40, temperature=0.0),
        SamplingParams(max_tokens=40, seed=3, ignore_eos=True),
    )
    penalised = SamplingParams(max_tokens=40, temperature=0.0, frequency_penalty=1.0)
    steps = []
    with LLM("tiny-model", on_steps=steps.extend, **SIZES, **ADAPTERS, **settings) as llm:
        found = llm.generate(PROMPTS, [greedy, drawn, penalised, greedy], n=2)
        found += llm.generate(PROMPTS[:1], greedy)
        adapted = llm.generate(PROMPTS[:1] * 4, greedy, lora=[None, "files", "network", "tests"])
        assert len({tuple(completion.token_ids) for completion in adapted}) > 2, "adapters change the tokens"
        found += adapted
        group = group_shape(llm.ready.shape, settings, llm.ready.dtype)
    assert any(step.preempted_ids for step in steps), "the pool is small enough"
    if settings:
        assert any(step.drafted_tokens for step in steps) == ("speculation" in settings)
        if "pipeline_parallel" not in settings:  # whose steps overlap: a record has the time behind the step before
            assert all(step.communication_ns <= step.device_ns for step in steps)
        assert max(len(step.rank_busy_ns) for step in steps) == 2
        if "pipeline_parallel" not in settings:
            for step in steps:  # the device's time of rank 0 is what the rank computed and exchanged, to the nanosecond
                assert step.rank_busy_ns[0] + step.rank_communication_ns[0] + step.rank_bubble_ns[0] == step.device_ns
        wall = steps[-1].end_ns - steps[0].begin_ns
        for rank in range(2):
            spent = sum(
                sum(getattr(step, f"rank_{activity}_ns")[rank:][:1]) for step in steps for activity in ACTIVITIES
            )
            assert 0 < spent <= wall + 50_000_000  # the last report of a step may stand in the next record
        if "pipeline_parallel" in settings:  # the last stage computes, sends, or waits for another one
            warm = steps[5:]  # before them memory is faulted in
            turns = sum(step.end_ns - step.begin_ns for step in warm)
            spent = sum(sum(getattr(step, f"rank_{name}_ns")[1:]) for step in warm for name in ACTIVITIES)
            assert 0.9 * turns < spent <= 1.02 * turns
            assert sum(step.exchange_hidden_ns.get("recv", 0) for step in steps) > 0
        for step in steps:
            expected = group.exchanges(sum(step.new_tokens), step.logit_rows)
            found_bytes = {name: step.exchanged_bytes.get(name, 0) for name in expected}
            assert found_bytes == {name: each.bytes for name, each in expected.items()}
    return [completion.token_ids for completion in found]


def test_groups_give_the_tokens_of_one_process_and_leave_no_process():
    alone = outputs()
    for settings in (
        {"tensor_parallel": 2, "speculation": "ngram"},
        {"tensor_parallel": 2, "overlap": "on"},
        {"pipeline_parallel": 2, "speculation": "draft-model", "speculation_model": "tiny-draft"},
    ):
        assert outputs(**settings) == alone, settings
        assert not ranks()


@pytest.fixture(scope="module")
def mixture(checkpoints, tmp_path_factory):
    """A mixture-of-experts model with the bundled model's tokenizer."""
    folder = shutil.copytree(checkpoints["mixtral"], tmp_path_factory.mktemp("mixture") / "mixtral")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_folder("tiny-model") / name, folder / name)
    return folder


def scored(folder: Path, **settings) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens and their log-probabilities."""
    with LLM(folder, **SIZES, **settings) as llm:
        found = llm.generate(PROMPTS, SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=0))
    return [(each.token_ids, [token.logprob for token in each.logprobs]) for each in found]


@pytest.mark.parametrize(
    "settings",
    [
        {"expert_parallel": 2, "expert_exchange": "all-to-all"},
        *further({"expert_parallel": 2},
                 {"tensor_parallel": 2, "expert_parallel": 2}, {"tensor_parallel": 2, "pipeline_parallel": 2},
                 {"pipeline_parallel": 2, "expert_parallel": 2}),
    ],
    ids=lambda settings: " ".join(settings),
)  # fmt: skip
def test_ranks_hold_experts_and_stages(mixture, settings):
    alone, divided = scored(mixture), scored(mixture, **settings)
    for expected, found in zip(alone, divided, strict=True):
        assert found[0] == expected[0]
        assert found[1] == pytest.approx(expected[1], abs=1e-4)
    assert not ranks()


def test_rank_that_is_killed_ends_the_calls_with_an_error():
    with LLM("tiny-model", tensor_parallel=2, **SIZES) as llm:
        (rank,) = ranks()
        os.kill(rank.pid, signal.SIGKILL)
        with pytest.raises(Exception, match="rank 1 of the parallel group was killed by signal 9"):
            llm.generate(PROMPTS, SamplingParams(max_tokens=100, ignore_eos=True))
    assert not ranks()


def ranks() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "techniques.group.rank" in " ".join(child.cmdline())]


class ScriptedRank:
    """Rank 1 as rank 0 sees it: a process that only sleeps, and a mailbox from which the test speaks."""

    def __init__(self, sockets: Path, rank: int, config: EngineConfig):
        self.process = subprocess.Popen(["sleep", "60"])
        self.mailbox = Mailbox(sockets, rank)
        self.say, self.hello = self.mailbox.say, messages.Hello(rank, identity(config, model_folder(config.model)))

    def die(self) -> None:
        self.process.kill()
        self.mailbox.close()
        time.sleep(0.2)  # until rank 0's socket has lost its peer


@pytest.fixture
def scripted(monkeypatch) -> Iterator[list[ScriptedRank]]:
    """Groups that are made get one scripted rank, which has said that it is there."""
    made: list[ScriptedRank] = []

    def start(sockets: Path, rank: int, config: EngineConfig) -> subprocess.Popen:
        made.append(ScriptedRank(sockets, rank, config))
        made[-1].say(made[-1].hello)
        return made[-1].process

    monkeypatch.setattr(group_module, "start_rank", start)
    monkeypatch.setattr(group_module, "connect", lambda *_: Communicators())
    monkeypatch.setattr(group_module, "SEND_MS", 200)
    yield made
    for each in made:
        each.mailbox.close()


@contextlib.contextmanager
def formed() -> Iterator[Group]:
    made = Group(EngineConfig(model="tiny-model", tensor_parallel=2), lambda sentence: None, StartupClock())
    try:
        yield made
    finally:
        made.close()


def test_rank_that_dies_after_its_plan_is_lost_before_anything_waits_for_it(scripted):
    with formed() as group:
        scripted[0].say(messages.Planned(1, 5))
        scripted[0].die()
        with pytest.raises(GroupError, match="rank 1 of the parallel group is lost: it takes no messages"):
            group.agree(9)


@pytest.mark.parametrize("say", [Group.conclude, lambda group: group.send(BetweenSteps("tiers", [[], []]))])
def test_message_to_a_rank_that_died_between_two_steps_is_an_error(scripted, say):
    with formed() as group:
        scripted[0].say(messages.Joined(1))
        group.begin()
        scripted[0].die()
        with pytest.raises(GroupError, match="rank 1 of the parallel group was killed by signal 9"):
            say(group)


def test_rank_that_never_says_that_it_is_there_is_an_error(scripted, monkeypatch):
    monkeypatch.setattr(group_module, "HELLO_SECONDS", 0.3)
    monkeypatch.setattr(Mailbox, "say", lambda mailbox, message: None)
    with pytest.raises(ModelError, match=r"rank 1 said nothing within 0\.3 s of its start"), formed():
        pass
    assert scripted[0].process.returncode == -signal.SIGKILL, "and it is killed"


def test_waits_for_the_other_ranks_are_no_set_up_of_this_one(scripted):
    startup = StartupClock()
    config = EngineConfig(model="tiny-model", tensor_parallel=2)
    with forming(config, startup, None, ends_process=False) as group:
        for delay, message in ((0.2, messages.Planned(1, 5)), (0.5, messages.Joined(1))):
            threading.Timer(delay, scripted[0].say, (message,)).start()
        assert group.agree(9) == 5
    phases_ns = startup.startup().phases_ns
    group.close()
    assert phases_ns["group"] > 0.45e9 and phases_ns["setup"] < 0.1e9
