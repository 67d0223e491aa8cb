"""One replay: the load of a run, its settings with a change, and the model of its turns; what its clients saw."""

import gc
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sojourn.engine.config import EngineConfig, keeps_all_blocks, largest_chunk_tokens, largest_step_tokens
from sojourn.engine.memory.window import FreedWindow, freed_window
from sojourn.metrics.compute.cost_model import ModelShape, tier_bytes
from sojourn.metrics.prediction import Change
from sojourn.metrics.time_limit import TimeLimit
from sojourn.replay.device.carried import UNKNOWN, Carried, carried_to, is_carried
from sojourn.replay.device.estimate import Deployment
from sojourn.replay.device.recorded_steps import RecordedSteps
from sojourn.replay.draft_odds import DraftModel
from sojourn.replay.known_sizes import KnownSizes
from sojourn.replay.load import BlockHashes, LoadChange, ReplayedLoad
from sojourn.replay.noise import Noise
from sojourn.replay.outcome import Answers, replayed_answers
from sojourn.replay.recorded import WAY_ACCOUNTS, RecordedLoad
from sojourn.replay.replayed_model import ReplayedDrafts
from sojourn.replay.replica import Clients, Replica, make_replica
from sojourn.replay.routing import make_routing
from sojourn.replay.settings import changed_config
from sojourn.replay.simulated_tiers import TierSpeed
from sojourn.replay.step_fit import StepTimes
from sojourn.replay.token_budget import token_budget
from sojourn.replay.turn_model import FittedTurns


@dataclass(frozen=True, slots=True)
class ServerPart:
    """One server of a fleet: what of it is not that of the others."""

    config: EngineConfig  # as it was recorded
    meta: Mapping[str, Any]  # its run.json
    times: StepTimes
    noise: Noise
    first_step_ns: int


@dataclass(frozen=True, slots=True)
class Material:
    """Everything of a run that its replays share. Processes get a copy. Of a fleet the load is of all servers, and all
    else of the best one; `servers` has what differs."""

    load: RecordedLoad
    times: StepTimes
    noise: Noise | None
    step_begins_ns: np.ndarray  # from the first step
    first_step_ns: int  # on the clock of the run
    overlap: bool
    device_type: str = "cpu"  # or cuda
    known: KnownSizes | None = None  # sizes that other runs of this model had
    shape: ModelShape | None = None  # None: another server than ours
    objective_tpot_ms: float | None = None  # of the server: what max_num_batched_tokens=auto keeps
    drafts: DraftModel | None = None  # of the run's speculation, or of prompt lookup where it had none
    tier_speeds: Mapping[str, TierSpeed] = field(default_factory=dict)  # by KV tier that the run had
    warm_blocks: int = 0  # that the disk tier held at the beginning
    deployment: Deployment = UNKNOWN  # as far as run.json says
    pool_tokens: int = 0  # of the run
    servers: tuple[ServerPart, ...] = ()  # of a fleet
    placed: Mapping[str, int] = field(default_factory=dict)  # request → place of its server, as the router chose


@dataclass(frozen=True, slots=True)
class Accident:
    """How one replay differs from another of the same change."""

    slowness: float = 1.0  # of the machine: device and host
    slowness_beyond: float = 1.0  # of steps larger or smaller than those of the run
    carried: int = 0  # -1, 1: another device is as fast, as slow, as the error of its estimate allows
    seed: int | None = None  # of the order of what disturbed the turns; None: as it was in the run


UNDISTURBED = Accident()


@dataclass(frozen=True, slots=True)
class Replayed:
    """What is kept of one replay. It is small: processes send it back."""

    answers: Answers
    cached_tokens: int
    preemptions: int
    steps: int
    refused: int
    repeated: int
    extrapolated: float  # share of the device time in steps larger or smaller than those of the run
    guessed: float  # share of the device time in steps of which no other run tells either


class Replayer:
    """Owns the hashes of the prompts, which all replays with one block size share."""

    def __init__(self, material: Material, limit: TimeLimit | None = None) -> None:
        self._material, self._limit = material, limit
        self._hashes: dict[int, BlockHashes] = {}
        self._carried: dict[str, Carried] = {}

    def carried(self, change: Change) -> Carried | None:
        """Of a change of hardware; None of any other. Raises ReplayError."""
        material = self._material
        if not is_carried(change, material.deployment):
            return None
        key = str(sorted((name, str(value)) for name, value in change.settings.items()))
        if key not in self._carried:
            own = RecordedSteps("the run", material.times, material.pool_tokens, material.deployment)
            self._carried[key] = carried_to(change, own, material.shape)
        return self._carried[key]

    def replay(self, change: Change, config: EngineConfig, accident: Accident = UNDISTURBED) -> Replayed:
        """Without the garbage collector: what a replay makes has no cycles, and a run's lists take long to walk."""
        collects = gc.isenabled()
        gc.disable()
        try:
            return self._replay(change, config, accident)
        finally:
            if collects:
                gc.enable()

    def _replay(self, change: Change, config: EngineConfig, accident: Accident = UNDISTURBED) -> Replayed:
        material = self._material
        assert config.num_kv_blocks is not None, "the size of the pool is part of the change"
        parts = self._parts(change, config, accident)
        hashes = self._hashes.setdefault(config.block_size, BlockHashes(config.block_size))
        load = ReplayedLoad(
            material.load,
            LoadChange(
                rate=change.arrival_rate,
                even=change.arrivals == "even",
                removed={name: share for name, share in change.removed.items() if name in WAY_ACCOUNTS},
                sessions=change.sessions,
            ),
            hashes,
            max_waiting=config.max_waiting,
            pool_tokens=_pool_tokens(config, window_of(material, config)),
        )
        carried = self.carried(change)
        turns = [
            FittedTurns(
                times, noise, device_speed=_speed(change, carried, accident), slowness=accident.slowness,
                slowness_beyond=accident.slowness_beyond, removed=change.removed,
                carried=None if carried is None else carried.ratio,
            )
            for _, times, noise in parts
        ]  # fmt: skip
        replicas = [
            replica_of(
                material,
                own,
                change,
                times if carried is None else carried.budget_times(times),
                each,
                load,
                slowness=accident.slowness,
                drafts=self._drafts(own, load),
            )
            for (own, times, _), each in zip(parts, turns, strict=True)
        ]
        routing = make_routing(
            change.routing, len(replicas), max_num_seqs=config.max_num_seqs, num_blocks=config.num_kv_blocks
        )
        is_recorded = change.routing == Change().routing
        sent = load.run(replicas, routing, material.placed if is_recorded else None, self._limit)
        device_ns = sum(each.device_ns for each in turns)
        return Replayed(
            answers=replayed_answers(sent),
            cached_tokens=sum(each.cached_tokens for each in sent),
            preemptions=sum(replica.observer.preemptions for replica in replicas),
            steps=sum(replica.num_steps for replica in replicas),
            refused=load.refused,
            repeated=load.repeated,
            extrapolated=sum(each.extrapolated_ns for each in turns) / device_ns if device_ns else 0.0,
            guessed=sum(each.guessed_ns for each in turns) / device_ns if device_ns else 0.0,
        )

    def _parts(
        self, change: Change, config: EngineConfig, accident: Accident
    ) -> list[tuple[EngineConfig, StepTimes, Noise | None]]:
        """Of each replica its settings and the times of its steps; their noise begins anew."""
        material = self._material
        if not material.servers or change.servers == "equal":
            if material.noise is not None:
                material.noise.restart(material.load.origin_ns - material.first_step_ns, accident.seed)
            count = len(material.servers) or change.replicas
            return [(config, material.times, material.noise)] * count
        for part in material.servers:
            part.noise.restart(material.load.origin_ns - part.first_step_ns, accident.seed)
        return [(changed_config(part.config, change, part.meta), part.times, part.noise) for part in material.servers]

    def _drafts(self, config: EngineConfig, load: ReplayedLoad) -> ReplayedDrafts | None:
        if config.speculation == "none":
            return None
        assert self._material.drafts is not None, "a change to speculation that nothing tells of is refused"
        return ReplayedDrafts(self._material.drafts, load.recorded_id)


def _speed(change: Change, carried: Carried | None, accident: Accident) -> float:
    """Of the device, with what the error of a carried device's estimate makes of it."""
    if carried is None or carried.error is None or not accident.carried:
        return change.device_speed
    return change.device_speed / (carried.error.low if accident.carried < 0 else carried.error.high)


def window_of(material: Material, config: EngineConfig) -> FreedWindow | None:
    """The blocks that a request gives back behind its window; None: it keeps all."""
    if material.shape is None:
        return None
    most_new = largest_chunk_tokens(config, largest_step_tokens(config, material.device_type))
    return freed_window(material.shape, most_new, keeps_all=keeps_all_blocks(config))


def replica_of(
    material: Material, config: EngineConfig, change: Change, times: StepTimes, turns: FittedTurns,
    clients: Clients, *, drafts: ReplayedDrafts | None = None, slowness: float = 1.0, steady: bool = False,
) -> Replica:  # fmt: skip
    """An engine with these settings whose turns take `turns`. `steady`: they take the same at all moments."""
    return make_replica(
        config, turns, clients, drafts=drafts, window=window_of(material, config), steady=turns if steady else None,
        overlap=material.overlap if config.overlap == "auto" else config.overlap == "on",
        budget=token_budget(config, change, times, slowness, material.device_type, material.objective_tpot_ms),
        block_bytes=None if material.shape is None else tier_bytes(material.shape, config.block_size),
        tier_speeds=material.tier_speeds,
    )  # fmt: skip


def _pool_tokens(config: EngineConfig, window: FreedWindow | None) -> int:
    """Of one request, at most."""
    if window is not None and window.most_blocks(config.block_size) <= config.num_kv_blocks:
        return sys.maxsize
    return config.num_kv_blocks * config.block_size
