"""How many replicas of a deployment serve a load at its rate, behind a router: replays of fleets, as of a run's."""

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from sojourn.engine.config import EngineConfig
from sojourn.engine.request.request import State
from sojourn.metrics.prediction import Change
from sojourn.replay.device.estimate import DeviceEstimate
from sojourn.replay.device.turns import EstimatedTurns, WholePrompts
from sojourn.replay.fleet.answer import FleetAnswer, FleetQuestion, fleet_answers
from sojourn.replay.fleet.simulate import CountedSteps, UsualWay
from sojourn.replay.fleet.traffic import TracedRequest
from sojourn.replay.replica import Clients, Replica, make_replica
from sojourn.replay.sizing.load import SizedLoad

ROUTING = "least-requests"
REQUESTS_A_REPLICA, MOST_REQUESTS = 200, 3000
MOST_REPLICAS = 32  # that are replayed; of a larger fleet the quotient of the rates tells
MOST_TRIES = 8
FEWEST_REQUESTS = 400


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """The smallest fleet that was found, and the largest that does not do."""

    replicas: int | None  # None: no fleet that was tried keeps the objectives
    rate_rps: float
    enough: FleetAnswer | None  # None: not replayed, the fleet is the quotient of the rates
    too_few: FleetAnswer | None


class EstimatedServers:
    """Engines whose steps take what a device estimate says."""

    way = UsualWay(0.0, 0.0, 0.0)

    def __init__(self, estimate: DeviceEstimate) -> None:
        self._estimate = estimate

    def server(self, config: EngineConfig, change: Change, clients: Clients) -> tuple[Replica, CountedSteps]:
        turns, found, budget = EstimatedTurns(self._estimate), [], None
        if self._estimate.composition == "whole-prompts":
            assert isinstance(config.max_num_batched_tokens, int), "an estimate's budget is a number"

            def waiting() -> Sequence[int]:
                requests = found[0].scheduler.requests.values()
                return [each.prompt_tokens for each in requests if each.state is State.WAITING]

            budget = WholePrompts(config.max_num_batched_tokens, waiting)
        found.append(make_replica(config, turns, clients, overlap=False, budget=budget, steady=turns))
        return found[0], turns


def fleet_for(
    load: SizedLoad, rate_rps: float, one_rps: float, estimate: DeviceEstimate, config: EngineConfig,
    objectives: Sequence[dict], share: float,
) -> Fleet:  # fmt: skip
    """`one_rps` is what one replica serves. Raises ReplayError for a load without moments, and OutsideTables."""
    rows = _rows(load, config.block_size)
    servers, tried = EstimatedServers(estimate), {}

    def answer(replicas: int) -> FleetAnswer:
        if replicas not in tried:
            requests = min(MOST_REQUESTS, max(FEWEST_REQUESTS, REQUESTS_A_REPLICA * replicas))
            question = FleetQuestion(
                replicas=replicas, num_requests=requests, rate=rate_rps, change=Change(), objectives=objectives
            )
            pool = _sized(config, rows)
            (tried[replicas],) = fleet_answers(servers, pool, rows, question, [ROUTING], 1)
        return tried[replicas]

    count = max(1, math.ceil(rate_rps / one_rps))
    while len(tried) < MOST_TRIES:
        if answer(count).attainment >= share:
            if count == 1 or (count - 1 in tried):
                break
            count -= 1
        elif count + 1 in tried:
            break
        else:
            count += 1
    kept = [replicas for replicas, found in tried.items() if found.attainment >= share]
    missed = [replicas for replicas, found in tried.items() if found.attainment < share]
    best = min(kept, default=None)
    return Fleet(
        replicas=best,
        rate_rps=rate_rps,
        enough=None if best is None else tried[best],
        too_few=tried[max(missed)] if missed else None,
    )


def _sized(config: EngineConfig, rows: Sequence[TracedRequest]) -> EngineConfig:
    """With no more blocks than the load can fill: pools of millions take long to make."""
    assert config.num_kv_blocks is not None, "the size of the pool is known"
    lengths = np.array([row.prompt_tokens + row.output_tokens for row in rows])
    most = int((-(-lengths // config.block_size) + 1).sum())
    shares = any(row.block_ids for row in rows)
    return config.model_copy(
        update={"num_kv_blocks": min(config.num_kv_blocks, most), "prefix_caching": shares}
    )  # fmt: skip


def _rows(load: SizedLoad, block_size: int) -> list[TracedRequest]:
    hashes, due_s = load.hashes(block_size), load.due_s(load.rate_rps)

    def blocks(place: int) -> tuple[int, ...]:
        if hashes is None:
            return ()
        return tuple(
            int.from_bytes(each[:6], "big") for each in hashes(place)[: load.prompt_tokens[place] // block_size]
        )

    return [
        TracedRequest(
            offset_s=float(due_s[place]), prompt_tokens=int(load.prompt_tokens[place]),
            output_tokens=int(load.output_tokens[place]), block_ids=blocks(place),
        )
        for place in range(len(load))
    ]  # fmt: skip
