"""What of a run its replays need: the load, and the model of its turns."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from sojourn.engine.config import EngineConfig
from sojourn.metrics.compute.cost_model import shape_from
from sojourn.metrics.errors import ReplayError
from sojourn.metrics.run.directory import RunDirectory, engine_settings, section
from sojourn.replay.device.recorded_steps import recorded_deployment
from sojourn.replay.draft_odds import DraftModel, lookup_drafts, recorded_drafts
from sojourn.replay.known_sizes import known_sizes
from sojourn.replay.noise import Noise
from sojourn.replay.recorded import recorded_load
from sojourn.replay.settings import overlaps, recorded_config
from sojourn.replay.simulate import Material, ServerPart
from sojourn.replay.simulated_tiers import tier_speeds, warm_blocks
from sojourn.replay.step_fit import StepColumns, StepTimes
from sojourn.replay.steps_table import FEWEST_STEPS, step_columns, under_load
from sojourn.replay.token_tree import with_sources_by_hash


def material_of(
    run: RunDirectory, meta: Mapping[str, Any], requests: pd.DataFrame, steps: pd.DataFrame, config: EngineConfig
) -> Material:
    """Raises ReplayError where the run lacks what a replay needs."""
    if not len(requests):
        raise ReplayError(f"{run.name} recorded no request, so there is nothing to replay")
    if requests.arrived_ns.isna().all():
        raise ReplayError(
            f"{run.name} has no request records of the server; record them with telemetry=full, by `sojourn run`, or "
            "join the server's recording with `sojourn join`"
        )
    if (role := engine_settings(dict(meta)).get("kv_role")) is not None:
        raise ReplayError(
            f"{run.name} is of a server with kv_role={role}, whose calls another server computes in part; a replay "
            "knows one server only"
        )
    steps = under_load(steps, requests)
    if len(steps) < FEWEST_STEPS:
        raise ReplayError(
            f"{run.name} has {len(steps)} step records; a replay learns the time of a step from at least "
            f"{FEWEST_STEPS}: record a longer run, with telemetry=full"
        )
    overlap = overlaps(config, meta)
    columns = step_columns(steps, overlap=overlap)
    known = known_sizes(meta, steps, columns)
    times = StepTimes(columns, None if known is None else known.steps)
    if requests.scheduled_ns.isna().any():
        requests = with_sources_by_hash(requests, config.block_size)
    return Material(
        load=recorded_load(run, requests, meta),
        times=times,
        noise=Noise(columns.begin_ns, times),
        step_begins_ns=columns.begin_ns,
        first_step_ns=int(steps.begin_ns.min()),
        overlap=overlap,
        known=known,
        device_type="cpu" if section(meta, "core").get("device", "cpu") == "cpu" else "cuda",
        shape=shape_from(meta),
        objective_tpot_ms=engine_settings(dict(meta)).get("objective_tpot_ms"),
        drafts=_drafts(config, requests, steps),
        tier_speeds=tier_speeds(steps),
        warm_blocks=warm_blocks(steps),
        deployment=recorded_deployment(meta),
        pool_tokens=(config.num_kv_blocks or 0) * config.block_size,
    )


def fleet_material(
    run: RunDirectory, meta: Mapping[str, Any], requests: pd.DataFrame, members: Sequence[RunDirectory]
) -> Material:
    """Of a fleet. Its servers keep their settings and the times of their steps. Raises ReplayError, as for one run."""
    found = [_part(member, int((requests.server == member.name).sum())) for member in members]
    if len(sizes := {part.config.block_size for part, _ in found}) > 1:
        raise ReplayError(f"the servers of {run.name} have blocks of {sizes} tokens, and a replay needs one size")
    places = {member.name: place for place, member in enumerate(members)}
    steps = [
        step_columns(member.table("steps"), overlap=own.overlap)
        for member, (_, own) in zip(members, found, strict=True)
    ]
    return replace(
        found[_best([part for part, _ in found], steps)][1],
        load=recorded_load(run, with_sources_by_hash(requests, sizes.pop()), meta),
        servers=tuple(part for part, _ in found),
        placed={name: places[server] for name, server in zip(requests.request_id, requests.server, strict=True)
                if server in places},
    )  # fmt: skip


def _part(member: RunDirectory, served: int) -> tuple[ServerPart, Material]:
    if not served:
        raise ReplayError(f"{member.name} served no request, so that nothing is known of its steps")
    meta = member.meta()
    config = recorded_config(meta)
    material = material_of(member, meta, member.requests(), member.table("steps"), config)
    assert material.noise is not None
    return ServerPart(config, meta, material.times, material.noise, material.first_step_ns), material


def _best(parts: Sequence[ServerPart], steps: Sequence[StepColumns]) -> int:
    """The server with room for most requests; of equal ones that which takes least time for the steps of all."""

    def rank(place: int) -> tuple[int, float]:
        spent = sum(float(parts[place].times.expected_ns(each).sum()) for each in steps)
        return -parts[place].config.max_num_seqs, spent

    return min(range(len(parts)), key=rank)


def _drafts(config: EngineConfig, requests: pd.DataFrame, steps: pd.DataFrame) -> DraftModel | None:
    """Of the run's proposer; of prompt lookup where the run had none, or asked for no draft."""
    own = None if config.speculation == "none" else recorded_drafts(steps, config.speculation)
    return own or lookup_drafts(requests)
