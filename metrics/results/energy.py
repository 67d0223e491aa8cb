"""Joules, and joules per token: power samples of the machine, summed up by trapezoids. Pure functions over records.

Samples there are of our own engine only, which takes them; another server's machine tells nothing. What this cannot
know either: what a device drew between two samples, and for whom. A device that others use too is charged to
this run whole, and of a host only its CPU packages are measured, without memory, disks and fans.
"""

from typing import Any

import msgspec
import numpy as np
import pandas as pd

from sojourn.metrics.machine.power import LONGEST_GAP_S, SENSORS
from sojourn.metrics.request.goodput import window_ns
from sojourn.metrics.run.directory import RunDirectory


class EnergyUse(msgspec.Struct, frozen=True, kw_only=True):
    """What a window of a run drew, by device. `None` where it has no sensor, or too few samples."""

    seconds: float
    joules: dict[str, float | None]  # of `SENSORS`
    output_tokens: int  # that came in the window
    joules_per_token: float | None  # of all sensors that there are


def joules(system: pd.DataFrame, device: str, begin_ns: int, end_ns: int) -> float | None:
    """What a device drew in a window, from rows of the table `system`.

    Power is taken to change linearly from one sample to the next, and at the ends of the window to be that of the
    nearest sample. None where the window has a stretch of more than LONGEST_GAP_S without a sample, or no sensor.
    """
    if end_ns <= begin_ns or SENSORS[device] not in system:
        return None
    known = system[["ns", SENSORS[device]]].dropna().sort_values("ns")
    stamps, watts = known.ns.to_numpy(dtype="int64"), known[SENSORS[device]].to_numpy(dtype="float64")
    if not len(stamps):
        return None
    first, last = np.searchsorted(stamps, begin_ns, "right") - 1, np.searchsorted(stamps, end_ns) + 1
    around = stamps[max(0, first) : last]
    gaps = (around[0] - begin_ns, *np.diff(around), end_ns - around[-1])
    if max(gaps) > LONGEST_GAP_S * 1e9:
        return None
    nodes = np.concatenate(([begin_ns], stamps[(stamps > begin_ns) & (stamps < end_ns)], [end_ns]))
    return float(np.trapezoid(np.interp(nodes, stamps, watts), (nodes - begin_ns) / 1e9))


def energy_use(system: pd.DataFrame, requests: pd.DataFrame, begin_ns: int, end_ns: int) -> EnergyUse:
    """What a window drew, and per output token that left the core in it (`token_ns` of the server's requests)."""
    used = {device: joules(system, device, begin_ns, end_ns) for device in SENSORS}
    known = [value for value in used.values() if value is not None]
    tokens = sum(_within(stamps, begin_ns, end_ns) for stamps in requests.token_ns) if "token_ns" in requests else 0
    return EnergyUse(
        seconds=max(0, end_ns - begin_ns) / 1e9,
        joules=used,
        output_tokens=tokens,
        joules_per_token=sum(known) / tokens if known and tokens else None,
    )


def _within(stamps: Any, begin_ns: int, end_ns: int) -> int:
    if stamps is None or np.ndim(stamps) == 0:  # no server record
        return 0
    read = np.asarray(stamps, dtype="int64")
    return int(((read >= begin_ns) & (read <= end_ns)).sum())


def run_energy(run: RunDirectory, requests: pd.DataFrame) -> EnergyUse | None:
    """Of a run, from the first moment when one of its `requests` was due to the last byte; None without a sensor."""
    window = window_ns(requests)
    if window is None:
        return None
    use = energy_use(run.table("system"), requests, *window)
    return use if any(value is not None for value in use.joules.values()) else None


def energy_line(use: EnergyUse) -> str:
    """As a report shows it: "1,250 J of the GPU and 310 J of the CPU in 12 s: 0.42 J per output token"."""
    amounts = [f"{value:,.0f} J of the {device.upper()}" for device, value in use.joules.items() if value is not None]
    each = "" if use.joules_per_token is None else f": {use.joules_per_token:.3g} J per output token"
    return f"{' and '.join(amounts)} in {use.seconds:,.0f} s{each}"
