"""What sensors in a file say: throttles, errors, and a device that is used and hardly works.

It says what a watch or a diagnosis with `--sensors` says. A device that idles is no problem by itself: only a log or
pages of the same time show that requests were in flight meanwhile.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from sojourn.diagnosis.causes import CAUSES
from sojourn.diagnosis.evidence import Means
from sojourn.diagnosis.sensor_facts import FEWEST, DeviceFacts, Flight, busiest_device, sensor_facts
from sojourn.diagnosis.statements import sensors
from sojourn.interop.held.held import Held, Reading
from sojourn.interop.sources.names import canonical
from sojourn.triage.summary_rules import LOG

SLOW = CAUSES["slow_device"]
IDLE = "whether requests were in flight meanwhile: the server's log or page shows it"
WAITS = "whether it waits for other devices or hangs: the server's log shows it"
LASTS = f"whether it lasts: fewer than {FEWEST} readings show it; `nvidia-smi dmon -s pucvmet` takes one per second"
REASONS = "nvidia-smi -q -d PERFORMANCE"
WORKS, UNEVEN = 0.8, 0.75  # of the time; of the clock of the fastest device
HELD = 0.8  # confidence of a clock that is held down for a stated reason


AROUND_NS = 15 * 10**9  # a log has a line each ten seconds
IN_FLIGHT = ("vllm:num_requests_running", "vllm:num_requests_waiting", "sglang:num_running_reqs",
             "sglang:num_queue_reqs")  # fmt: skip


class SensorFact(NamedTuple):
    sentence: str
    is_problem: bool
    key: str = ""  # of the cause, where there is one
    cause: str = ""
    confidence: float = 0.0
    rival: str = ""
    unknown: str = ""
    next: str = LOG


def facts(readings: Sequence[Reading], flight: Flight | None = None) -> Iterator[SensorFact]:
    """Rows of one look come without a moment: those of a sensor count as looks of their own."""
    seen = sensor_facts(_table(readings), flight)
    busiest = busiest_device(seen)
    is_busy = seen is not None and (seen.in_flight or 0.0) >= sensors.ALWAYS_BUSY
    for device in seen.devices if seen is not None else ():
        if (how := sensors.throttle(device, fewest=1)) is not None:
            words = f"{how.words} ({how.proof.statement.partition(': ')[2]})"
            lasts = SensorFact(words, True, SLOW.key, how.words, HELD, SLOW.reads[Means].rival)
            yield lasts if device.readings >= FEWEST else SensorFact(words, False, unknown=LASTS)
        for words, is_own in sensors.errors(device):
            yield SensorFact(words, True, unknown="" if is_own else "whether it is over: the kernel's log has it")
        yield from _work(device, has_requests=is_busy and device is busiest)
    yield from _uneven_clocks(seen.devices if seen is not None else ())


def _uneven_clocks(devices: Sequence[DeviceFacts]) -> Iterator[SensorFact]:
    """Devices that work as much as another of their kind, at a much lower clock. Other work may lower it, too."""
    working = [(each.clock_used, each) for each in devices if each.clock_used and (each.used or 0.0) >= WORKS]
    for limit in {each.highest.get("sm_clock_limit") for _, each in working}:
        alike = [pair for pair in working if pair[1].highest.get("sm_clock_limit") == limit]
        highest, fastest = max(alike, key=lambda pair: pair[0])
        for clock, each in alike:
            if clock < UNEVEN * highest and sensors.throttle(each, fewest=1) is None:
                heat = each.mean("temperature")
                at = f", at {heat:.0f} °C" if heat is not None else ""
                yield SensorFact(
                    f"{each.device} works at {clock / 1e6:,.0f} MHz{at}, and {fastest.device} at {highest / 1e6:,.0f}: "
                    "of one group, the slowest device holds up all", False,
                    unknown=f"why the clock of {each.device} is lower: the driver states it", next=REASONS,
                )  # fmt: skip


def flight_beside(held: Held, others: Iterable[Held]) -> Flight | None:
    """The requests that a log or pages show at the times of a file of sensors; None where none are of that time."""
    moments = [each.ns for each in held.sensors if each.ns is not None]
    if not moments:
        return None
    counts: dict[int, float] = {}
    for row in (row for each in others if each.is_wall_clock for row in each.series):
        if canonical(row["name"]) in IN_FLIGHT:
            counts[row["ns"]] = counts.get(row["ns"], 0.0) + row["value"]
    within = [ns for ns in counts if min(moments) - AROUND_NS <= ns <= max(moments) + AROUND_NS]
    if len(within) < 2:
        return None
    ordered = sorted(counts)
    return Flight(np.array(ordered), np.array([counts[ns] for ns in ordered]))


def _table(readings: Sequence[Reading]) -> pd.DataFrame:
    count: dict[tuple[str, str], int] = {}
    rows = []
    for each in readings:
        place = count[each.device, each.name] = count.get((each.device, each.name), 0) + 1
        ns = each.ns if each.ns is not None else place * 10**9
        rows.append((ns, each.device, each.name, each.value))
    return pd.DataFrame(rows, columns=["ns", "device", "name", "value"])


def _work(device: DeviceFacts, *, has_requests: bool) -> Iterator[SensorFact]:
    what, line = sensors.bound(device), sensors.sentence(device)
    if what == "host" and has_requests:
        cause = CAUSES["slow_host"]
        yield SensorFact(line, True, cause.key, f"the host holds {device.device} up: it idles while requests are in "
                         "flight", HELD, cause.reads[Means].rival)  # fmt: skip
    elif what == "host":
        used = f"{device.used or 0.0:.0%}"
        yield SensorFact(f"{device.device} worked {used} of {device.readings} readings: it had little to do", False,
                         unknown=IDLE)  # fmt: skip
    elif what in ("launches", "pcie"):
        yield SensorFact(line, True, unknown=WAITS if what == "launches" else "")
    elif what:
        yield SensorFact(line, False)
