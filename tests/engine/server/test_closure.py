"""Every way in which a request can go through the server, over HTTP: its ledger closes, on a pool that is too small."""

import contextlib
import selectors
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sojourn.metrics.ledger import closes
from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.run.join import adopt
from tests.engine.closure import open_books, open_steps, rows_of, table
from tests.engine.server_process import Running, serving, wait_for
from tests.engine.sockets import LARGE_ANSWER, call, ids
from tests.loadgen.scenarios import replay, scenario

pytestmark = pytest.mark.server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TIGHT = ("--num-kv-blocks", "40", "--max-num-batched-tokens", "64", "--max-prefill-chunk-tokens", "32",
         "--max-num-seqs", "6", "--max-model-len", "512")  # fmt: skip


class Tight:
    """A running server and what it records."""

    def __init__(self, server: Running, folder: Path):
        self.server, self.folder = server, folder
        self._names = 0

    def name(self, kind: str) -> str:
        self._names += 1
        return f"{kind}-{self._names}"

    def ask(self, name: str, path: str, body: dict) -> httpx.Response:
        headers = {"x-request-id": name}
        return httpx.post(f"{self.server.url}{path}", json={"model": "tiny-model"} | body, headers=headers, timeout=60)

    def ask_all(self, calls: list[tuple[str, dict]], kind: str) -> tuple[list[dict], list[httpx.Response]]:
        """All at once. Returns their records and their answers."""
        names = [self.name(kind) for _ in calls]
        with ThreadPoolExecutor(len(calls)) as pool:
            answers = list(pool.map(lambda item: self.ask(item[0], *item[1]), zip(names, calls, strict=True)))
        return rows_of(self.folder, names), answers

    def call(self, name: str, body: dict, *, small: bool = False):
        return call(self.server, name, {"model": "tiny-model"} | body, small=small)


def started(folder: Path, *options: str):
    return serving(folder, "tiny-model", *TIGHT, "--run-dir", str(folder / "run"), *options)


@pytest.fixture(scope="module")
def tight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tight")
    with started(folder) as server:
        yield Tight(server, folder / "run")


@pytest.fixture(scope="module")
def overlapped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("overlapped")
    with started(folder, "--overlap", "on") as server:
        yield Tight(server, folder / "run")


def chat(content: str, **body) -> tuple[str, dict]:
    return CHAT, {"messages": [{"role": "user", "content": content}], "max_tokens": 12} | body


def completion(prompt, **body) -> tuple[str, dict]:
    return COMPLETIONS, {"prompt": prompt, "max_tokens": 12} | body


STREAM = {"stream": True}
ASKED = {"messages": [{"role": "user", "content": "Return a list"}], "max_tokens": 12}
WAYS = {
    "whole": completion("The function"),
    "streamed": completion("The function", **STREAM, stream_options={"include_usage": True}),
    "chat": chat("Return a list"),
    "chat-streamed": chat("Return a list", **STREAM),
    "responses": (RESPONSES, {"input": "Return a list", "max_output_tokens": 12}),
    "responses-streamed": (RESPONSES, {"input": "Return a list", "max_output_tokens": 12} | STREAM),
    "messages": (MESSAGES, ASKED),
    "messages-streamed": (MESSAGES, ASKED | STREAM),
    "several-choices": completion("The function", n=4, **STREAM),
    "several-prompts": completion(["The function", "Return a list", "x"], n=2),
    "best-of": completion("The function", n=1, best_of=3),
    "chunked": completion(ids(200, 1), **STREAM),
    "log-probabilities": completion("The function", logprobs=5, **STREAM),
    "prompt-log-probabilities": completion(ids(60, 2), prompt_logprobs=2),
    "echo": completion("The function", echo=True, logprobs=1),
    "no-output": completion("The function", echo=True, max_tokens=0),
    "grammar": completion("x", guided_regex="[a-z]{3,9}", **STREAM),
    "grammar-whole": chat("x", response_format={"type": "json_object"}),
    "stop-string": completion("The function", stop=["e", "a"], max_tokens=40, **STREAM),
    "penalties": completion("The function", repetition_penalty=1.3, logit_bias={"300": 5}, temperature=0.7, **STREAM),
}  # fmt: skip


SEVERAL = ("no-output", "several-choices", "several-prompts", "best-of")


def check_every_way(tight: Tight) -> None:
    rows, answers = tight.ask_all(list(WAYS.values()), "way")
    assert [answer.status_code for answer in answers] == [200] * len(WAYS), [answer.text for answer in answers]
    for way, row in zip(WAYS, rows, strict=True):
        assert open_books(row) == [], way
        assert row["first_written_ns"] is not None or way in ("no-output", "stop-string"), way
        if row["finish_reason"] == "length" and way not in SEVERAL:
            positions = row["cached_tokens"] + row["computed_tokens"]
            assert positions == row["prompt_tokens"] + row["output_tokens"] - 1, way


def test_every_way_to_ask_closes(tight):
    check_every_way(tight)


def check_preempted(tight: Tight) -> None:
    calls = [completion(ids(40, seed), max_tokens=150, ignore_eos=True, stream=seed % 2 == 0) for seed in range(8)]
    rows, _ = tight.ask_all(calls, "preempted")
    victims = [row for row in rows if row["preemptions"]]
    assert victims and all(row["recomputed_tokens"] and row["ledger_memory_preempted_ns"] for row in victims)
    assert [fault for row in rows for fault in open_books(row)] == []


def test_preempted_and_recomputed_requests_close(tight):
    check_preempted(tight)


def test_a_prompt_that_is_cached_closes(tight):
    prompt = ids(150, 77)
    (first,), _ = tight.ask_all([completion(prompt)], "cold")
    (second,), _ = tight.ask_all([completion(prompt, **STREAM)], "cached")
    assert first["cached_tokens"] == 0 and second["cached_tokens"] >= 100
    assert open_books(first) + open_books(second) == []


def check_abandoned(tight: Tight) -> None:
    """Six places: those that come later wait. Whoever leaves is told apart by how far the core had come with it."""
    long = {"prompt": "The", "max_tokens": 400, "stream": True}
    running = [tight.name("decoding") for _ in range(6)]
    queued = [tight.name("queued") for _ in range(3)]
    with contextlib.ExitStack() as stack:
        for name in running:
            assert stack.enter_context(tight.call(name, long)).recv(1)
        others = [stack.enter_context(tight.call(name, long)) for name in queued]
        wait_for(lambda: tight.server.gauge("sojourn_request_waiting") >= 3)
        for connection in others:
            connection.close()
        wait_for(lambda: tight.server.gauge("sojourn_request_waiting") == 0)
    wait_for(lambda: tight.server.gauge("sojourn_request_running") == 0)
    prefilling = [tight.name("prefilling") for _ in range(12)]  # one of them fits
    with contextlib.ExitStack() as stack:
        for seed, name in enumerate(prefilling):
            stack.enter_context(tight.call(name, {"prompt": ids(490, seed), "max_tokens": 20}))
        wait_for(lambda: tight.server.gauge("sojourn_request_waiting") >= 3)
    rows = rows_of(tight.folder, running + queued + prefilling)
    assert {row["finish_reason"] for row in rows[:9]} == {"abort"}
    assert all(row["output_tokens"] for row in rows[:6]) and not any(row["output_tokens"] for row in rows[6:9])
    assert all(row["ledger_request_queue_ns"] + row["ledger_memory_blocked_ns"] > 0 for row in rows[6:9])
    assert [fault for row in rows for fault in open_books(row)] == []


def test_requests_that_are_left_while_they_wait_prefill_or_decode_close(tight):
    check_abandoned(tight)


def test_requests_that_cannot_go_on_close(tight):
    impossible = {"min_tokens": 2, "allowed_token_ids": [2], "max_tokens": 4}
    seven = httpx.post(f"{tight.server.url}/tokenize", json={"prompt": "7"}).json()["tokens"][-1]
    late = {"guided_regex": "7{3}8", "allowed_token_ids": [seven], "max_tokens": 8}  # three tokens can be drawn
    calls = [completion("x", **impossible), completion("x", **impossible, **STREAM), completion("x", **late, **STREAM),
             completion("x", **impossible, n=3, **STREAM)]  # fmt: skip
    rows, answers = tight.ask_all(calls, "erred")
    assert [row["error"] is not None for row in rows] == [True] * 4, [answer.text for answer in answers]
    assert [fault for row in rows for fault in open_books(row)] == []
    # What the client reads of its failure is written, too: the books go up to there.
    assert all(row["written_ns"] is not None for row in rows)


NUM_READERS = 32


def test_thirty_two_slow_readers_close_and_pay_for_their_own_slowness(tight):
    """They read nothing until all is computed, and then a little at a time."""
    names = [tight.name("slow") for _ in range(NUM_READERS)]
    selector, open_sockets = selectors.DefaultSelector(), NUM_READERS
    with contextlib.ExitStack() as stack:
        for name in names:
            opened = stack.enter_context(tight.call(name, LARGE_ANSWER, small=True))
            selector.register(opened, selectors.EVENT_READ)
        wait_for(lambda: tight.server.gauge("sojourn_request_waiting") > 0)
        wait_for(lambda: tight.server.gauge("sojourn_request_waiting") == 0, 60)
        wait_for(lambda: tight.server.gauge("sojourn_request_running") == 0)
        began_ns = time.monotonic_ns()
        while open_sockets:
            time.sleep(0.01)
            for key, _ in selector.select(timeout=30):
                if not key.fileobj.recv(16_384):
                    selector.unregister(key.fileobj)
                    open_sockets -= 1
    rows = rows_of(tight.folder, names)
    assert [fault for row in rows for fault in open_books(row)] == []
    assert {row["output_tokens"] for row in rows} == {2 * 10}
    for row in rows:
        assert row["ledger_request_stream_ns"] > began_ns - row["token_ns"][-1] > 0, "it did not wait for its reader"


def test_joined_with_what_the_client_saw_every_request_closes(tight, tmp_path):
    chosen = scenario(
        {"process": "constant", "rate_rps": 12, "count": 12},
        [{"klass": "joined", "prompt_tokens": 60, "output_tokens": 40, "ignore_eos": True}],
    )
    parsed = replay(chosen, tight.server.url, tmp_path, "tiny-model", "joined")
    names = [record.request_id for record in parsed.records]
    rows_of(tight.folder, names)
    adopt(tmp_path, {"requests": RunDirectory(tight.folder).sources("requests")}, 0, time.monotonic_ns())
    run = RunDirectory(tmp_path)
    requests = run.requests()
    assert (requests.status == "ok").all() and len(requests) == 12
    for row in requests.itertuples():
        assert closes(row.unaccounted_ns, row.last_byte_ns - row.due_ns)
        assert closes(row.ttft_unaccounted_ns, row.first_token_ns - row.due_ns)


ways = st.one_of(
    st.sampled_from(sorted(WAYS)).map(lambda way: WAYS[way]),
    st.builds(
        lambda length, tokens, n, streamed, seed: completion(
            ids(length, seed), max_tokens=tokens, n=n, stream=streamed, ignore_eos=True
        ),
        st.integers(1, 200), st.integers(1, 90), st.integers(1, 3), st.booleans(), st.integers(0, 3),
    ),
)  # fmt: skip
leaves_after_s = st.none() | st.floats(0, 0.15)  # None stays to the end
mixes = st.lists(st.tuples(ways, st.floats(0, 0.1), leaves_after_s), min_size=2, max_size=10)


def check_mix(tight: Tight, mix) -> None:
    def play(item) -> str:
        ((path, body), after_s, leaves_s) = item
        time.sleep(after_s)
        if leaves_s is None:
            name = tight.name("mixed")
            assert tight.ask(name, path, body).status_code == 200
        else:
            name = tight.name("left")
            with tight.call(name, body if path == COMPLETIONS else completion("The")[1]):
                time.sleep(0.02 + leaves_s)
        return name

    with ThreadPoolExecutor(len(mix)) as pool:
        names = list(pool.map(play, mix))
    rows_of(tight.folder, [name for name in names if name.startswith("mixed")])
    # Who left before the server had read its body was no request; who left later is told of within a moment.
    rows = [row for row in table(tight.folder, "requests") if row["request_id"] in names]
    assert [fault for row in rows for fault in open_books(row)] == []


SHRINKING_HELPS_NOBODY = (Phase.explicit, Phase.generate)  # a race does not come again
health = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=3, derandomize=True, phases=SHRINKING_HELPS_NOBODY, suppress_health_check=health)
@given(mixes)
def test_any_mix_of_calls_closes(tight, mix):
    check_mix(tight, mix)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=60, phases=SHRINKING_HELPS_NOBODY, suppress_health_check=health)
@given(mixes)
def test_any_mix_of_calls_closes_in_many_runs(tight, mix):
    check_mix(tight, mix)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=40, phases=SHRINKING_HELPS_NOBODY, suppress_health_check=health)
@given(mixes)
def test_any_mix_of_calls_closes_where_steps_overlap(overlapped, mix):
    check_mix(overlapped, mix)


@pytest.mark.slow
@pytest.mark.parametrize("check", [check_every_way, check_preempted, check_abandoned])
def test_every_path_closes_where_steps_overlap(overlapped, check):
    check(overlapped)


def test_steps_stages_blocks_and_tokens_of_all_of_it_close(tight):
    """Whatever ran before, and at least this."""
    tight.ask_all([completion(ids(50, 5)), completion(ids(90, 6), **STREAM)], "last")
    wait_for(lambda: tight.server.gauge("sojourn_request_running") == 0)
    requests = table(tight.folder, "requests")
    computed = sum(row["computed_tokens"] + row["recomputed_tokens"] for row in requests)
    wait_for(lambda: sum(sum(step["new_tokens"]) for step in table(tight.folder, "steps")) >= computed)
    steps = table(tight.folder, "steps")
    assert sum(sum(step["new_tokens"]) for step in steps) == computed
    assert sorted(step["step"] for step in steps) == list(range(len(steps)))
    assert open_steps(steps) == []
    assert [fault for row in requests for fault in open_books(row)] == []
