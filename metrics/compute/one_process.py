"""What one process would take for the steps of a parallel group, by runs and calibrations of one."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from sojourn.metrics.compute.cost_model import shape_from
from sojourn.metrics.compute.speed_facts import ENOUGH_COVERED, stored_entries
from sojourn.metrics.compute.speed_reference import expected, of_one_process, settings_of, step_features
from sojourn.metrics.run.directory import engine_settings
from sojourn.metrics.steps import Steps, rows_of


def one_process_ns(meta: Mapping[str, Any], steps: pd.DataFrame, threads: int) -> float | None:
    """Device time of all steps in one process with so many times the threads of a rank; None where no entry of the
    run's speed reference has its settings in one process, or where they know too few of its steps."""
    shape = shape_from(meta)
    if shape is None or not len(steps):
        return None
    own = of_one_process(settings_of(meta, engine_settings(dict(meta))))
    if own["threads"]:
        own["threads"] *= threads
    entries = [entry for entry in stored_entries(meta) if entry.settings == own]
    if not entries:
        return None
    batch = Steps(rows_of(steps))
    normal = expected(entries, step_features(shape, batch), batch["logit_rows"].astype(float))
    device, known = batch["device_ns"].astype(float), ~np.isnan(normal.device_ns)
    if device[known].sum() < ENOUGH_COVERED * device.sum():
        return None
    alone = normal.device_ns[known].sum() + np.nan_to_num(normal.sampling_ns[known]).sum()
    return float(alone * device.sum() / device[known].sum())
