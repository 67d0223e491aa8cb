"""Steps in which the engine stood still, and what the machine did meanwhile."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import pyarrow as pa

from sojourn.metrics.request.stalls import COLUMNS, stalled

FEWEST_SAMPLES = 2  # around a stall, to know what was done within it


@dataclass(frozen=True, slots=True)
class StallFacts:
    """All stalls of a run; what is said of one is said of the longest."""

    count: int
    total_ns: int
    step: int
    longest_ns: int
    device_ns: int  # of that step
    at_s: float  # it ended so long after the first step began
    core_on_cpu: float | None  # cores that the engine's process used meanwhile
    others_cores: float | None  # and all other processes of its machine
    has_prediction: bool  # the step model knew its kind

    @property
    def sentence(self) -> str:
        took = f"step {self.step:,} took {self.longest_ns / 1e6:,.0f} ms longer than what it held explains"
        return took if self.count == 1 else f"{took}, and {self.count - 1} other steps stood still, too"


def stall_facts(steps: pa.Table, system: pd.DataFrame, cores: int) -> StallFacts | None:
    """None of a run without a stall. `steps` has all columns."""
    if not len(steps):
        return None
    at, length = stalled(steps.select(list(COLUMNS)))
    if not len(at):
        return None
    steps = steps.sort_by("step")
    chosen = int(at[np.argmax(length)])
    longest = int(length.max())
    row = steps.slice(chosen, 1).to_pylist()[0]
    end = row["device_end_ns"] or row["end_ns"]
    core, others = _meanwhile(system, end - longest, end, cores)
    return StallFacts(
        count=len(at),
        total_ns=int(length.sum()),
        step=int(row["step"]),
        longest_ns=longest,
        device_ns=int(row["device_ns"]),
        at_s=(end - int(steps["begin_ns"][0].as_py())) / 1e9,
        core_on_cpu=core,
        others_cores=others,
        has_prediction=row["predicted_ns"] is not None,
    )


def _meanwhile(system: pd.DataFrame, begin_ns: int, end_ns: int, cores: int) -> tuple[float | None, float | None]:
    """Cores of the engine's process and of all others, from the counters around a stall. None where it was shorter than
    the time between two samples."""
    ordered = system.sort_values("ns", ignore_index=True)
    inside = ordered[(ordered.ns >= begin_ns) & (ordered.ns <= end_ns + 1_500_000_000)]
    if len(inside) < FEWEST_SAMPLES:
        return None, None
    spent = inside.core_cpu_seconds.astype("float64")
    lasted = (inside.ns.iloc[-1] - inside.ns.iloc[0]) / 1e9
    if spent.isna().any() or lasted <= 0:
        return None, None
    core = max(0.0, float(spent.iloc[-1] - spent.iloc[0])) / lasted
    host = inside.host_cpu_percent.astype("float64").iloc[1:].mean() / 100 * cores
    front = inside.front_cpu_percent.astype("float64").iloc[1:].mean() / 100
    return core, None if np.isnan(host) else max(0.0, float(host - core - (0.0 if np.isnan(front) else front)))
