"""One replay of a fleet under the traffic of a trace: what its clients saw, by column."""

import gc
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np

from sojourn.engine.config import EngineConfig
from sojourn.engine.messages import Ended, Submit
from sojourn.engine.sampling import SamplingParams
from sojourn.metrics.prediction import Change
from sojourn.replay.fleet.traffic import FleetTraffic
from sojourn.replay.next_turn import NextTurn
from sojourn.replay.noise import LARGEST_RATIO
from sojourn.replay.replica import Clients, Replica
from sojourn.replay.routing import RoutingPolicy
from sojourn.replay.simulate import Material, replica_of
from sojourn.replay.step_fit import StepTimes
from sojourn.replay.turn_model import FittedTurns

NO_MOMENT = math.nan


@dataclass(slots=True)
class FleetAnswers:
    """By request, in order of arrival. Moments are ns; NaN where nothing came."""

    first_ns: np.ndarray
    last_ns: np.ndarray
    replica: np.ndarray  # -1: another process replays it
    is_refused: np.ndarray
    cached_tokens: np.ndarray
    preemptions: int
    steps: int
    device_ns: float
    extrapolated_ns: float  # of it in steps larger or smaller than those of the run


@dataclass(frozen=True, slots=True)
class UsualWay:
    """What surrounds the core for the median request of the run, ns."""

    way_in: float
    first_out: float
    last_out: float


class UsualNoise:
    """Each step has the mean of what the run's steps took beyond the fit, without its outages."""

    def __init__(self, times: StepTimes) -> None:
        def mean(ratio: np.ndarray, expected_ns: np.ndarray) -> float:
            return float((np.minimum(ratio, LARGEST_RATIO) * expected_ns).sum() / max(1.0, expected_ns.sum()))

        self._ratios = mean(times.device_ratio, times.predicted_ns), mean(times.host_ratio, times.host_ns), 0.0

    def at(self, now_ns: float, expected_ns: float) -> tuple[float, float, float]:
        return self._ratios


class CountedSteps(Protocol):
    """What a replica's step model counts."""

    device_ns: float
    extrapolated_ns: float  # of it in steps larger or smaller than those that are known


class FleetServers(Protocol):
    """What the engines of a fleet are."""

    way: UsualWay

    def server(self, config: EngineConfig, change: Change, clients: Clients) -> tuple[Replica, CountedSteps]: ...


class RecordedServers:
    """Engines whose steps take as long as those of a run, without its accidents."""

    def __init__(self, material: Material) -> None:
        self._material, self._noise = material, UsualNoise(material.times)
        requests = material.load.requests
        self.way = UsualWay(
            *(float(np.median([sum(getattr(each, name).values()) for each in requests]))
              for name in ("way_in", "first_out", "last_out"))
        )  # fmt: skip

    def server(self, config: EngineConfig, change: Change, clients: Clients) -> tuple[Replica, CountedSteps]:
        material = self._material
        turns = FittedTurns(material.times, self._noise, device_speed=change.device_speed, removed=change.removed)
        steady = config.pipeline_parallel == 1
        return replica_of(material, config, change, material.times, turns, clients, steady=steady), turns


class FleetReplay:
    """Owns the replicas `kept` of a fleet and their clock. The others are replayed elsewhere, or not at all."""

    def __init__(
        self, servers: FleetServers, config: EngineConfig, change: Change, traffic: FleetTraffic,
        routing: RoutingPolicy, kept: Iterable[int],
    ) -> None:  # fmt: skip
        self._traffic, self._routing = traffic, routing
        self._way = servers.way
        self._max_waiting = config.max_waiting
        self._pool_tokens = config.num_kv_blocks * config.block_size
        self._max_num_seqs = config.max_num_seqs
        self.replicas: list[Replica] = []
        self._steps: list[CountedSteps] = []
        self._place_of: dict[int, int] = {}
        for number in kept:
            self._place_of[number] = len(self.replicas)
            replica, steps = servers.server(config, change, self)
            self._steps.append(steps)
            self.replicas.append(replica)
        self._turns = NextTurn(self.replicas)
        count = len(traffic)
        self._first_ns, self._last_ns = np.full(count, NO_MOMENT), np.full(count, NO_MOMENT)
        self._replica = np.full(count, -1, dtype=np.int32)
        self._is_refused = np.zeros(count, dtype=bool)
        self._cached = np.zeros(count, dtype=np.int64)
        self._hashes: dict[int, list[bytes]] = {}  # of requests that no engine has received

    def run(self) -> FleetAnswers:
        """Without the garbage collector: what a replay makes has no cycles."""
        collects = gc.isenabled()
        gc.disable()
        try:
            prompts, outputs = self._traffic.prompt_tokens.tolist(), self._traffic.output_tokens.tolist()
            for request, due_ns in enumerate(self._traffic.due_ns.tolist()):
                now_ns = due_ns + self._way.way_in
                self._turn_until(now_ns)
                self._arrive(request, prompts[request], outputs[request], now_ns)
            self._turn_until(float("inf"))
        finally:
            if collects:
                gc.enable()
        return FleetAnswers(
            self._first_ns, self._last_ns, self._replica, self._is_refused, self._cached,
            preemptions=sum(each.observer.preemptions for each in self.replicas),
            steps=sum(each.num_steps for each in self.replicas),
            device_ns=sum(each.device_ns for each in self._steps),
            extrapolated_ns=sum(each.extrapolated_ns for each in self._steps),
        )  # fmt: skip

    def _turn_until(self, now_ns: float) -> None:
        """All turns that receive before this moment."""
        turns, replicas = self._turns, self.replicas
        while True:
            cutoff_ns, place = turns.first()
            if cutoff_ns >= now_ns:
                return
            replicas[place].turn()
            turns.changed(place)

    def _arrive(self, number: int, prompt_tokens: int, output_tokens: int, now_ns: float) -> None:
        hashes = self._traffic.hashes(number)
        chosen = self._routing.choose(self._traffic.session(number), hashes)
        if (place := self._place_of.get(chosen)) is None:
            return
        self._replica[number] = chosen
        replica = self.replicas[place]
        free = 0 if replica.waiting else self._max_num_seqs - len(replica.scheduler.running)
        is_too_long = prompt_tokens + output_tokens > self._pool_tokens
        if is_too_long or replica.waiting + 1 > self._max_waiting + free:
            self._is_refused[number] = True
            self._routing.ended(chosen)
            return
        message = Submit(str(number), [0] * prompt_tokens, _sampling(output_tokens), encoded_ns=round(now_ns))
        self._hashes[number] = hashes
        replica.submit(message, now_ns)
        self._turns.changed(place)

    def hashes_of(self, sequence: str) -> list[bytes]:
        return self._hashes.pop(int(sequence))

    def first_token(self, request_id: str, now_ns: float) -> None:
        self._first_ns[int(request_id)] = now_ns + self._way.first_out

    def ended(self, ended: Ended, now_ns: float) -> None:
        number = int(ended.request_id)
        self._last_ns[number] = now_ns + self._way.last_out
        self._cached[number] = ended.cached_tokens
        self._routing.ended(int(self._replica[number]))


@cache
def _sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)
