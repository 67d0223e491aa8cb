"""What is left of two sides without the seconds in which other machines took CPU time from the server's.

What is kept must not hang on what a system did with the time it got: a slower one has longer requests, of which more
would meet a disturbed second, and it would look fast by those that are left. So each request and each step is judged by
the same length of time from its begin, on both sides: what LASTING of all of them take.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from sojourn.metrics.compare.samples import RunSamples
from sojourn.metrics.errors import InputError
from sojourn.metrics.machine.steal import undisturbed

LASTING = 0.90
Sides = Sequence[Sequence[RunSamples]]


def undisturbed_requests(sides: Sides, most_percent: float) -> list[list[RunSamples]]:
    """The runs with those requests only. Raises InputError where a run does not tell, or has none left."""
    latencies = np.concatenate([each.requests.e2e_ms.to_numpy("float64") for side in sides for each in side])
    measured = latencies[np.isfinite(latencies)]
    lasting_ns = float(np.quantile(measured, LASTING)) * 1e6 if len(measured) else 0.0
    return [[_undisturbed_samples(each, lasting_ns, most_percent) for each in side] for side in sides]


def undisturbed_steps(sides: Sides, steps: list[list[pd.DataFrame]], most_percent: float) -> list[list[pd.DataFrame]]:
    """Of each run's steps those; raises InputError."""
    took_ns = np.concatenate([each.took_ns.to_numpy("float64") for side in steps for each in side])
    lasting_ns = float(np.quantile(took_ns, LASTING)) if len(took_ns) else 0.0
    return [
        [
            table[undisturbed(_system_of(each), table.begin_ns.to_numpy("float64"), lasting_ns, most_percent)]
            for each, table in zip(side, tables, strict=True)
        ]
        for side, tables in zip(sides, steps, strict=True)
    ]


def left_out(
    runs: Sequence[RunSamples], left: Sequence[RunSamples], steps: Sequence[pd.DataFrame],
    left_steps: Sequence[pd.DataFrame], most_percent: float,
) -> str | None:  # fmt: skip
    """What a side lost by it, where it lost anything."""
    lost = [1 - len(rest.requests) / len(each.requests) for each, rest in zip(runs, left, strict=True)]
    lost_steps = [1 - len(rest) / len(each) for each, rest in zip(steps, left_steps, strict=True) if len(each)]
    if not any(lost) and not any(lost_steps):
        return None
    worst = f" ({max(lost):.0%} in the worst run)" if len(lost) > 1 else ""
    of_steps = f" and {np.mean(lost_steps):.0%} of the steps" if lost_steps else ""
    return (
        f"{np.mean(lost):.0%} of the requests{worst}{of_steps} are left out: they met a second in which other machines "
        f"took more than {most_percent:.3g}% of the CPU time, or one that nobody sampled"
    )


def _undisturbed_samples(each: RunSamples, lasting_ns: float, most_percent: float) -> RunSamples:
    due_ns = each.requests.due_ns.to_numpy("float64")
    selected = undisturbed(_system_of(each), due_ns, lasting_ns, most_percent)
    if not selected.any():
        raise InputError(
            f"{each.run.path} has no request outside the seconds in which other machines took more than "
            f"{most_percent:.3g}% of the CPU time, or that nobody sampled; measure it again, or allow more"
        )
    return each._replace(requests=each.requests[selected].reset_index(drop=True))


def _system_of(each: RunSamples) -> pd.DataFrame:
    """The samples of its machine. Raises InputError where none has the CPU steal."""
    system = each.run.table("system")
    if not len(system) or system.host_steal_percent.isna().all():
        raise InputError(f"{each.run.path} does not record CPU steal; only our own server on Linux does")
    return system
