"""Pairs of runs beside a neighbour that takes a core, now and then or all the time.

Each pair has arrivals, a change and a neighbour of its own. The two runs of a pair have the same kind of neighbour at
other moments, as two runs on a shared machine do.
"""

import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from sojourn.loadgen.run.experiment import run_scenario
from sojourn.loadgen.run.run_files import is_whole
from sojourn.loadgen.scenario.scenario import Scenario, load_scenario
from sojourn.loadgen.target.endpoint import Endpoint
from sojourn.metrics.prediction import Change
from sojourn.metrics.run.directory import RunDirectory

SCENARIOS = Path(__file__).parent.parent / "scenarios"
RUN_SECONDS = 12.0
NOISES = ("whole", "bursts", "half")
BURST_SECONDS = 1.5  # mean of a burst and of the pause after it
Noise = Literal["none", "whole", "bursts", "half"]


class Kind(NamedTuple):
    """A workload, the settings of its first run, and what its second run has different."""

    scenario: str
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    pace: float = 0.6  # of the first run's arrivals, against the scenario's: the rest of the machine is the neighbour's
    faster: float = 1.0  # the second run's arrivals against the first's: the same requests, so many times as fast


KINDS: dict[str, Kind] = {
    "larger batch": Kind("trace", {"max_num_seqs": 2}, {"max_num_seqs": 32}),
    "smaller batch": Kind("trace", {"max_num_seqs": 16}, {"max_num_seqs": 3}),
    "faster arrivals": Kind("trace", {"max_num_seqs": 8}, {"max_num_seqs": 8}, pace=0.45, faster=1.5),
    "larger batch, bursts": Kind("burst", {"max_num_seqs": 2}, {"max_num_seqs": 16}),
    "larger budget": Kind("documents-beside-chat", {"max_num_batched_tokens": 64}, {"max_num_batched_tokens": 512}),
}


class NoisyPair(NamedTuple):
    """One pair and how it is recorded."""

    number: int
    kind: str
    noise: Noise

    @property
    def name(self) -> str:
        return f"{self.number:02d}-{self.kind.replace(', ', ' ').replace(' ', '-')}-{self.noise}"

    @property
    def change(self) -> Change:
        kind = KINDS[self.kind]
        settings = {name: value for name, value in kind.after.items() if kind.before.get(name) != value}
        return Change(settings=settings, arrival_rate=kind.faster)

    def runs(self, folder: Path) -> tuple[Path, Path]:
        return folder / self.name / "before", folder / self.name / "after"


def noisy_pairs(count: int, noises: Sequence[Noise] = NOISES) -> list[NoisyPair]:
    """Kinds and neighbours in turn, so that any part of the list has all of them."""
    kinds = list(KINDS)
    return [NoisyPair(number, kinds[number % len(kinds)], noises[number // len(kinds) % len(noises)])
            for number in range(count)]  # fmt: skip


def record(pair: NoisyPair, folder: Path) -> None:
    """Makes the runs of a pair that are not whole yet."""
    kind = KINDS[pair.kind]
    for place, (path, settings) in enumerate(zip(pair.runs(folder), (kind.before, kind.after), strict=True)):
        if is_whole(path):
            continue
        spells = busy_spells(pair.noise, random.Random(2 * pair.number + place))
        run_scenario(
            _scenario(kind.scenario, pair.number, kind.pace, kind.faster if place else 1.0), path,
            engine_overrides={**settings, "port": 0}, seed=pair.number, surroundings=Neighbour(spells),
        )  # fmt: skip


def busy_spells(noise: Noise, rng: random.Random) -> list[tuple[float, float]]:
    """Seconds of pause and of work, in turn, over a run and what comes after it."""
    if noise == "none":
        return []
    if noise == "whole":
        return [(0.0, 2 * RUN_SECONDS)]
    if noise == "half":
        pause = rng.uniform(0, RUN_SECONDS)
        if pause < RUN_SECONDS / 2:
            return [(pause, RUN_SECONDS / 2)]
        return [(0.0, pause - RUN_SECONDS / 2), (RUN_SECONDS / 2, RUN_SECONDS)]
    return [
        (rng.expovariate(1 / BURST_SECONDS), rng.expovariate(1 / BURST_SECONDS))
        for _ in range(round(RUN_SECONDS / BURST_SECONDS))
    ]


class Neighbour:
    """Owns a process that computes as `spells` say, from the first request to the end of the load."""

    def __init__(self, spells: Sequence[tuple[float, float]]) -> None:
        self._spells = spells
        self._process: subprocess.Popen | None = None

    def begin(self, endpoint: Endpoint, run_dir: Path, router_pid: int | None) -> Endpoint:
        return endpoint

    def loading(self, pid: int) -> None: ...

    def sending(self) -> None:
        if self._spells:
            self._process = subprocess.Popen([sys.executable, "-c", SPIN, repr(list(self._spells))])

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


SPIN = """
import ast, sys, time
for pause, work in ast.literal_eval(sys.argv[1]):
    time.sleep(pause)
    until = time.monotonic() + work
    while time.monotonic() < until:
        pass
"""


def _scenario(name: str, number: int, pace: float, faster: float) -> Scenario:
    """Each pair has its own minute of the trace, or its own seed. `faster` sends the same requests."""
    scenario = load_scenario(str(SCENARIOS / f"{name}.yaml"))
    arrivals = scenario.arrivals
    if arrivals.process == "trace":
        update = {
            "start_s": arrivals.start_s + RUN_SECONDS * arrivals.speedup * number,
            "duration_s": RUN_SECONDS * arrivals.speedup * pace,
            "speedup": arrivals.speedup * pace * faster,
        }
    else:
        update = {"rate_rps": arrivals.rate_rps * pace, "duration_s": RUN_SECONDS}
    return scenario.model_copy(update={"arrivals": arrivals.model_copy(update=update)})


def whole_pairs(pairs: Sequence[NoisyPair], folder: Path) -> list[tuple[NoisyPair, RunDirectory, RunDirectory]]:
    """Those with both runs."""
    found = []
    for pair in pairs:
        before, after = pair.runs(folder)
        if is_whole(before) and is_whole(after):
            found.append((pair, RunDirectory(before), RunDirectory(after)))
    return found
