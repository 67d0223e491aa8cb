"""What of a run its walls need: the mean request, the model of its steps, and the ceilings of its device."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pandas as pd

from sojourn.metrics.compute.cost_model import ModelShape, shape_from
from sojourn.metrics.compute.roofline import Ceilings
from sojourn.metrics.compute.speed_reference import step_features
from sojourn.metrics.compute.step_time import StepTimeModel
from sojourn.metrics.errors import RunDataError
from sojourn.metrics.request.goodput import measured
from sojourn.metrics.run.directory import RunDirectory, section
from sojourn.metrics.steps import Steps, rows_of
from sojourn.replay.verdict.plan import Load
from sojourn.replay.verdict.walls import MeanRequest, Wall, measured_walls, memory_wall, objective_wall

# What a server that keeps up does not have.
WAITS = ["ledger_request_queue_ns", "ledger_memory_blocked_ns", "ledger_memory_preempted_ns"]


class RunWalls:
    """The walls of a run's load on its machine, for any settings."""

    def __init__(self, run: RunDirectory) -> None:
        meta = run.meta()
        shape = shape_from(meta)
        served = measured(run.requests(), meta)
        served = served[(served.status == "ok") & served.output_tokens.notna()]
        if shape is None or not len(served):
            raise RunDataError(f"{run.path} has no model shape or no served request, so its walls cannot be computed")
        self._shape = shape
        self._core = section(meta, "core")
        prompt, cached = (served[name].astype("float64").fillna(0.0) for name in ("prompt_tokens", "cached_tokens"))
        self.mean = MeanRequest(
            prompt_tokens=float(prompt.mean()),
            computed_tokens=float((prompt - cached).mean()),
            output_tokens=float(served.output_tokens.astype("float64").mean()),
        )
        self._model = step_time_of(shape, run.table("steps"))
        self._ceilings = _ceilings(meta)

    def at(
        self, settings: Mapping[str, Any], pool_tokens: int, rate_rps: float, e2e_ms: float, tpot_ms: float | None
    ) -> list[Wall]:
        """The walls for settings at a load. `settings` must have max_num_seqs; `e2e_ms` is the mean latency there."""
        most = int(settings["max_num_seqs"])
        batch = min(most, max(1.0, rate_rps * e2e_ms / 1e3))
        precision = str(self._core.get("weights") or self._core.get("dtype") or "")
        walls = [
            memory_wall(self._shape, self.mean, pool_tokens, e2e_ms / 1e3),
            *measured_walls(self._shape, self.mean, batch, self._ceilings, precision),
        ]
        if tpot_ms is not None:
            walls.append(objective_wall(self._shape, self.mean, self._model, tpot_ms, most))
        return walls


def recorded_load(run: RunDirectory) -> Load:
    """What a run sent. Raises RunDataError where nothing was measured."""
    meta = run.meta()
    rows = measured(run.requests(), meta)
    if not len(rows):
        raise RunDataError(f"{run.path} has no measured request, so there is nothing to plan for")
    begin_s = rows.due_ns.astype("float64") / 1e9
    end_s = begin_s + rows.e2e_ms.astype("float64").fillna(0.0) / 1e3
    waited_s = rows.reindex(columns=WAITS).astype("float64").fillna(0.0).sum(axis=1) / 1e9
    conversation = rows.session_id.where(rows.session_id.notna() & (rows.session_id != ""), rows.request_id)
    begins, ends, waits = (
        begin_s.groupby(conversation).min(), end_s.groupby(conversation).max(), waited_s.groupby(conversation).sum(),
    )  # fmt: skip
    return Load(
        begins_s=(begins - begins.min()).tolist(),
        lasts_s=(ends - begins - waits).clip(lower=0.0).tolist(),
        output_tokens=float(rows.output_tokens.astype("float64").sum()),
    )


def step_time_of(shape: ModelShape, steps: pd.DataFrame) -> StepTimeModel:
    """The model of step times, taught with all steps of a run."""
    model = StepTimeModel()
    steps = steps[(steps.new_tokens.map(len) > 0) & steps.device_ns.notna()]
    if len(steps):
        batch = Steps(rows_of(steps))
        model.observe_all(step_features(shape, batch), batch["device_ns"])
    return model


def _ceilings(meta: Mapping[str, Any]) -> Ceilings | None:
    try:
        return msgspec.convert(meta.get("ceilings"), Ceilings)
    except msgspec.ValidationError:
        return None
