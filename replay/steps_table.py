"""The step records of a run as the columns that a model of their time reads."""

import numpy as np
import pandas as pd

from sojourn.metrics.steps import EAGER
from sojourn.replay.step_fit import StepColumns

FEWEST_STEPS = 20  # fewer tell nothing of how long steps take


def step_columns(steps: pd.DataFrame, *, overlap: bool) -> StepColumns:
    """Of `RunDirectory.table("steps")`, in the order of their begin. Steps without a sequence are left out."""
    steps = steps[steps.new_tokens.map(len) > 0].sort_values("begin_ns", ignore_index=True)
    sizes = steps.new_tokens.map(len).to_numpy()
    new, past = (_joined(steps[name]) for name in ("new_tokens", "past_tokens"))
    owner = np.repeat(np.arange(len(steps)), sizes)
    single, verify = new == 1, np.array([kind == "verify" for kinds in steps.kinds for kind in kinds], dtype=bool)
    pairs = new * past + new * (new + 1) / 2

    def summed(values: np.ndarray) -> np.ndarray:
        return np.bincount(owner, weights=values.astype(float), minlength=len(steps))

    begin = _floats(steps.begin_ns)
    device_ns = _floats(steps.device_ns)
    transfer_ns, draft_ns = _known(steps, "load_ns") + _known(steps, "store_ns"), _known(steps, "draft_ns")
    stage = {name: _floats(steps[f"stage_{name}_ns"]) for name in _STAGES}
    launched = begin + sum(stage[name] for name in ("receive", "schedule", "prepare", "launch"))
    sampled = launched + stage["wait"] + stage["sample"]
    device_end = _floats(steps.device_end_ns)
    device_end = np.where(np.isnan(device_end), sampled, device_end)
    before = stage["schedule"] + stage["prepare"] + stage["launch"]
    if not overlap:  # the device began when the host had launched, or a little before it looked at the clock
        before = np.maximum(device_end - device_ns - begin - stage["receive"], 0.0)
    waited = np.maximum(sampled - np.maximum(device_end, launched), 0.0)
    rows = _floats(steps.logit_rows)
    has_graphs = bool((steps.graph != EAGER).any())
    return StepColumns(
        begin_ns=begin - begin[0] if len(begin) else begin,
        tokens=summed(new),
        decodes=summed(single),
        decode_pairs=summed(pairs * single),
        chunks=summed(~single),
        chunk_pairs=summed(pairs * ~single),
        eager_prompts=((summed(~single) > 0) & has_graphs).astype(float),
        rows=np.where(np.isnan(rows) | (rows == 0), sizes, rows),
        device_ns=np.maximum(device_ns - transfer_ns, 0.0),  # a replay adds those copies by their bytes
        sampling_ns=np.nan_to_num(_floats(steps.sampling_ns)),
        receive_ns=stage["receive"],
        before_ns=before,
        after_ns=np.maximum(waited - draft_ns, 0.0) + stage["commit"],
        publish_ns=stage["publish"],
        has_graphs=has_graphs,
        verifies=summed(verify),
        verified_rows=summed(new * verify),
    )


_STAGES = ("receive", "schedule", "prepare", "launch", "wait", "sample", "commit", "publish")


def _known(steps: pd.DataFrame, name: str) -> np.ndarray:
    """A column that older runs lack."""
    return np.nan_to_num(_floats(steps[name])) if name in steps else np.zeros(len(steps))


def _joined(lists: pd.Series) -> np.ndarray:
    return np.concatenate([np.zeros(0), *lists]).astype(float)


def _floats(column: pd.Series) -> np.ndarray:
    return column.astype("float64").to_numpy(dtype="float64", na_value=np.nan)


def under_load(steps: pd.DataFrame, requests: pd.DataFrame) -> pd.DataFrame:
    """Those from the first request on: before it, a server warms itself up."""
    first_sent = requests.sent_ns.min()
    return steps[steps.begin_ns >= (0 if pd.isna(first_sent) else first_sent)]
