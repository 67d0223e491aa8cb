"""The first load of an unknown server: whatever the server does, no more is sent than was announced."""

import re
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest

from sojourn.loadgen.run.small_load import (
    LOOKS,
    MOST_IN_FLIGHT,
    SmallLoad,
    answer_of,
    paced_rate,
    send_small_load,
)
from sojourn.loadgen.scenario.options import LoadOptions
from tests.loadgen.scenarios import replay
from tests.loadgen.scripted_server import Script, ScriptedServer


@dataclass
class Recording(ScriptedServer):
    """Counts what is in flight. After `good` requests it answers as `later` says."""

    good: int = 0
    later: Script = field(default_factory=Script)
    in_flight: int = 0
    most_in_flight: int = 0

    async def _complete(self, writer, path: str, body: dict, arrived_ns: int) -> None:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        if len(self.seen) > self.good:
            self.script = self.later
        try:
            await super()._complete(writer, path, body, arrived_ns)
        finally:
            self.in_flight -= 1

    def prompt_words(self) -> int:
        return sum(len(each["body"]["prompt"].split()) for each in self.seen)

    def output_tokens(self) -> int:
        return sum(each["body"]["max_tokens"] for each in self.seen)


def quick(scenario, timeout_s: float = 1.0):
    """The same scenario for a test that does not wait 30 s for a server that never answers."""
    return scenario.model_copy(update={"target": scenario.target.model_copy(update={"timeout_s": timeout_s})})


@pytest.mark.parametrize(
    ("good", "later"),
    [
        (0, Script(status=429)), (0, Script(status=500)), (0, Script(break_after=1)), (0, Script(hang=True)),
        (3, Script(status=429)), (3, Script(first_token_s=60.0)), (2, Script(error_after=2)),
    ],
    ids=["429", "500", "broken off", "hangs", "429 later", "slow later", "dies later"],
)  # fmt: skip
def test_a_server_that_fails_or_slows_down_is_left_alone_at_once(tmp_path, good, later):
    server = Recording(Script(), good=good, later=later).start()
    done = replay(quick(SmallLoad(LoadOptions()).paced(20.0)), server.url, tmp_path)
    assert len(server.seen) <= good + MOST_IN_FLIGHT and server.most_in_flight <= MOST_IN_FLIGHT
    assert done.parsed.stopped is not None and done.parsed.num_unfinished == 0  # what was sent is on record
    assert len(done.records) == len(server.seen)
    assert re.search(r"failed: |were in flight", done.parsed.stopped[1])


def test_requests_that_are_sent_alone_wait_for_each_other_and_end_with_the_first_failure(tmp_path):
    server = Recording(Script(), good=2, later=Script(status=429)).start()
    replay(SmallLoad(LoadOptions()).alone(), server.url, tmp_path)
    assert len(server.seen) == 3 and server.most_in_flight == 1


@pytest.mark.parametrize("asked", [LoadOptions(), LoadOptions(prompt_tokens=40, output_tokens=7)])
def test_announced_bounds_hold_for_all_that_is_built(tmp_path, asked):
    load = SmallLoad(asked)
    server = Recording(Script(first_token_s=0.0, gap_s=0.0)).start()
    for part in ("a", "b"):
        (tmp_path / part).mkdir()
    replay(load.alone(), server.url, tmp_path / "a")
    paced = load.paced(3.0)
    hurried = paced.model_copy(update={"arrivals": paced.arrivals.model_copy(update={"rate_rps": 300.0})})
    patient = hurried.model_copy(
        update={"target": hurried.target.model_copy(update={"stop_at_in_flight": None})}
    )  # so that all is sent that was built
    replay(patient, server.url, tmp_path / "b")
    assert len(server.seen) == load.most_requests
    assert 0 < server.prompt_words() <= load.most_prompt_tokens
    assert server.output_tokens() == load.most_output_tokens
    said = dict(load.sentences())["sends at most"]
    assert f"{load.most_requests} requests" in said and f"{load.most_output_tokens:,} output" in said


def test_the_rate_follows_the_server():
    rates = [paced_rate(seconds) for seconds in (0.01, 0.3, 1.0, 4.0)]
    assert rates[0] == 3.0 and all(a >= b for a, b in pairwise(rates)) and rates[2] == 0.5
    assert paced_rate(12.0) is None  # too few requests would come in the time


def test_the_answer_is_known_where_chance_would_not_give_it():
    assert answer_of(12, 12).endswith("most requests meet the SLO, 12 of 12") and answer_of(11, 12)
    assert "fewer than half" in answer_of(0, 12) and answer_of(10, 12) == answer_of(6, 12) == ""
    random = np.random.default_rng(1).random((4_000, 48)) < 0.5  # neither: at most 5 % of answers are wrong
    wrong = [any(answer_of(int(row[:look].sum()), look) for look in LOOKS) for row in random]
    assert 0 < np.mean(wrong) <= 0.05


@pytest.mark.slow
@pytest.mark.parametrize(("later", "most"), [(None, 85), (Script(status=429), 6), (Script(hang=True), 9)])
def test_the_whole_small_load_stays_within_its_bounds(tmp_path, monkeypatch, later, most):
    monkeypatch.setattr("sojourn.loadgen.run.small_load.TIMEOUT_S", 4.0)
    server = Recording(Script(), good=5 if later else 10_000, later=later or Script()).start()
    load, said = SmallLoad(LoadOptions()), []
    run, rate = send_small_load(load, server.url, tmp_path / "run", said.append)
    assert len(server.seen) <= most <= load.most_requests and server.most_in_flight <= MOST_IN_FLIGHT
    assert server.prompt_words() <= load.most_prompt_tokens and server.output_tokens() <= load.most_output_tokens
    assert run.meta()["valid"], run.meta()["invalid_reasons"]
    assert (rate is not None) == (later is None)
    if later is None:  # the answer was known before all were sent
        assert len(server.seen) < load.most_requests and "the answer is known" in said[-1]
