"""Whether the device waits for the host to launch kernels: on a GPU, over the steps that only decode."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from sojourn.metrics.records import composition
from sojourn.metrics.run.directory import section
from sojourn.metrics.steps import EAGER

FEWEST_STEPS = 32  # a median of fewer is good to a fifth at best


@dataclass(frozen=True, slots=True)
class Launches:
    """Decode steps of a GPU. Shares are of their device time."""

    eager_share: float  # in steps that replayed no graph, 0 to 1
    launch_share: float  # of those steps, what the host took to launch them; about 1 where the device waits for it
    fixed_share: float  # of those steps, what does not grow with the sequences in them, 0 to 1
    step_ms: float  # median device time of those steps


def launches_of(meta: Mapping[str, Any], steps: pd.DataFrame) -> Launches | None:
    """None for another device than a GPU, and where fewer than FEWEST_STEPS decode steps replayed no graph."""
    if not str(section(meta, "core").get("device") or "").startswith("cuda") or not len(steps):
        return None
    decodes = steps[np.array([composition(list(kinds)) == "decode" for kinds in steps.kinds], dtype=bool)]
    eager = decodes[decodes.graph == EAGER]
    device, all_device = (table.device_ns.to_numpy("float64") for table in (eager, decodes))
    if len(eager) < FEWEST_STEPS or all_device.sum() <= 0:
        return None
    sequences = np.array([len(names) for names in eager.request_ids], dtype=float)
    slope = float(np.polyfit(sequences, device, 1)[0]) if len(set(sequences)) > 1 else 0.0
    return Launches(
        eager_share=float(device.sum() / all_device.sum()),
        launch_share=float(eager.stage_launch_ns.sum() / device.sum()),
        fixed_share=float(np.clip(1 - slope * sequences.mean() / device.mean(), 0.0, 1.0)),
        step_ms=float(np.median(device)) / 1e6,
    )
