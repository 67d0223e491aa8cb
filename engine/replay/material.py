"""What of a run its replays need: the load, and the model of its turns."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from engine.config import EngineConfig
from engine.replay.drafts import DraftModel, lookup_drafts, recorded_drafts
from engine.replay.known_sizes import known_sizes
from engine.replay.noise import Noise
from engine.replay.recorded import recorded_load
from engine.replay.simulate import Material
from engine.replay.step_fit import StepTimes
from engine.replay.steps_table import step_columns
from engine.replay.tiers import tier_speeds, warm_blocks
from metrics.compute.cost_model import shape_from
from metrics.errors import ReplayError
from metrics.run.directory import RunDirectory, engine_settings, section

FEWEST_STEPS = 20  # fewer tell nothing of how long steps take


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
    first_sent = requests.sent_ns.min()
    steps = steps[steps.begin_ns >= (0 if pd.isna(first_sent) else first_sent)]  # before it, a server warms itself up
    if len(steps) < FEWEST_STEPS:
        raise ReplayError(
            f"{run.name} has {len(steps)} step records; a replay learns the time of a step from at least "
            f"{FEWEST_STEPS}: record a longer run, with telemetry=full"
        )
    overlap = _overlaps(config, meta)
    columns = step_columns(steps, overlap=overlap)
    known = known_sizes(meta, steps, columns)
    times = StepTimes(columns, None if known is None else known.steps)
    return Material(
        load=recorded_load(run, requests, meta),
        times=times,
        noise=Noise(columns, times),
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
    )


def _drafts(config: EngineConfig, requests: pd.DataFrame, steps: pd.DataFrame) -> DraftModel | None:
    """Of the run's proposer; of prompt lookup where the run had none, or asked for no draft."""
    own = None if config.speculation == "none" else recorded_drafts(steps, config.speculation)
    return own or lookup_drafts(requests)


def _overlaps(config: EngineConfig, meta: Mapping[str, Any]) -> bool:
    if config.overlap != "auto":
        return config.overlap == "on"
    return section(meta, "core").get("device", "cpu") != "cpu"
