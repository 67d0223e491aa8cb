"""CPU time that a hypervisor gave to other machines while a run was measured, from rows of the table `system`."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from sojourn.metrics.machine.host import SAMPLE_SECONDS, STEAL_WARNS_PERCENT


@dataclass(frozen=True, slots=True)
class Steal:
    """In percent of the time of all cores of the server's machine."""

    mean: float  # over the window
    worst: float  # of the samples, of a second each, that reach into the window


def steal_within(system: pd.DataFrame, begin_ns: int, end_ns: int) -> Steal | None:
    """None where no sample of the window has the value. A sample is the mean since the one before, and counts as far as
    that time lies in the window."""
    if not len(system):
        return None
    begins, ends, percent = _samples(system)
    within = np.minimum(ends, end_ns) - np.maximum(begins, begin_ns)
    measured = (within > 0) & ~np.isnan(percent)
    if not measured.any():
        return None
    return Steal(float(np.average(percent[measured], weights=within[measured])), float(percent[measured].max()))


def undisturbed(system: pd.DataFrame, begins_ns: np.ndarray, lasting_ns: float, most_percent: float) -> np.ndarray:
    """[n] Whether no sample that reaches into [begin, begin + lasting) lost more; False where a sample is missing."""
    if not len(system):
        return np.zeros(len(begins_ns), dtype=bool)
    begins, ends, percent = _samples(system)
    disturbed = np.concatenate(([0], np.cumsum(~(percent <= most_percent))))
    first = np.searchsorted(ends, begins_ns, side="right")
    last = np.searchsorted(ends, np.asarray(begins_ns, dtype="float64") + max(lasting_ns, 1.0), side="left")
    sampled = (begins_ns >= begins[0]) & (last < len(ends))
    return sampled & (disturbed[np.minimum(last + 1, len(ends))] == disturbed[np.minimum(first, len(ends))])


def _samples(system: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Begins and ends [samples] in ns, and percent. A sample reaches back to the one before."""
    rows = system.sort_values("ns")
    ends = rows.ns.to_numpy("float64")
    return (
        np.concatenate(([ends[0] - SAMPLE_SECONDS * 1e9], ends[:-1])),
        ends,
        rows.host_steal_percent.to_numpy("float64"),
    )


def steal_sentence(steal: Steal | None) -> str | None:
    """Of a window that lost more than STEAL_WARNS_PERCENT."""
    if steal is None or steal.mean <= STEAL_WARNS_PERCENT:
        return None
    return (
        f"the hypervisor gave {steal.mean:.1f}% of the CPU time of the server's machine to other machines "
        f"({steal.worst:.0f}% in the worst second): step times and latencies are those of a machine that was not its "
        "own. Measure again, or compare without such seconds: `sojourn compare --max-steal 1%`"
    )
