"""What sensors in a file say: throttles, errors, and a device that is used and hardly works.

It says what a watch or a diagnosis with `--sensors` says, but for one thing: no request is known beside a file, so that
a device that idles is no problem by itself.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pandas as pd

from sojourn.diagnosis.causes import CAUSES
from sojourn.diagnosis.evidence import Means
from sojourn.diagnosis.sensor_facts import DeviceFacts, sensor_facts
from sojourn.diagnosis.statements import sensors
from sojourn.interop.held.held import Reading

SLOW = CAUSES["slow_device"]
IDLE = "whether requests were in flight meanwhile: the server's log or page shows it"
WAITS = "whether it waits for other devices or hangs: the server's log shows it"
HELD = 0.8  # confidence of a clock that is held down for a stated reason


class SensorFact(NamedTuple):
    sentence: str
    is_problem: bool
    key: str = ""  # of the cause, where there is one
    cause: str = ""
    confidence: float = 0.0
    rival: str = ""
    unknown: str = ""


def facts(readings: Sequence[Reading]) -> Iterator[SensorFact]:
    """Rows of one look come without a moment: those of a sensor count as looks of their own."""
    seen = sensor_facts(_table(readings))
    for device in seen.devices if seen is not None else ():
        if (how := sensors.throttle(device, fewest=1)) is not None:
            yield SensorFact(f"{how.words} ({how.proof.statement.partition(': ')[2]})", True, SLOW.key, how.words, HELD,
                             SLOW.reads[Means].rival)  # fmt: skip
        for words, is_own in sensors.errors(device):
            yield SensorFact(words, True, unknown="" if is_own else "whether it is over: the kernel's log has it")
        yield from _work(device)


def _table(readings: Sequence[Reading]) -> pd.DataFrame:
    count: dict[tuple[str, str], int] = {}
    rows = []
    for each in readings:
        place = count[each.device, each.name] = count.get((each.device, each.name), 0) + 1
        ns = each.ns if each.ns is not None else place * 10**9
        rows.append((ns, each.device, each.name, each.value))
    return pd.DataFrame(rows, columns=["ns", "device", "name", "value"])


def _work(device: DeviceFacts) -> Iterator[SensorFact]:
    what, line = sensors.bound(device), sensors.sentence(device)
    if what == "host":
        used = f"{device.used or 0.0:.0%}"
        yield SensorFact(f"{device.device} worked {used} of {device.readings} readings: it had little to do", False,
                         unknown=IDLE)  # fmt: skip
    elif what in ("launches", "pcie"):
        yield SensorFact(line, True, unknown=WAITS if what == "launches" else "")
    elif what:
        yield SensorFact(line, False)
