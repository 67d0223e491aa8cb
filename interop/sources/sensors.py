"""What sensors of GPUs show as text: a DCGM exporter's page, `nvidia-smi dmon`, and CSV of `--query-gpu`.

A column whose unit is not the one that its writer documents is refused: it stands in `unread`, and no value is taken
from it. A sensor that a device lacks (`-`, `[N/A]`, DCGM's blank values) is no reading.

What readings cannot show: the time between two of them.
"""

import csv
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, tzinfo
from itertools import pairwise
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from sojourn.interop.sources.sensor_names import NAMES, REASONS, UNWRITTEN, WRITTEN

DEVICE_COLUMNS = ("index", "uuid", "gpu_uuid", "pci.bus_id", "gpu_bus_id")
NO_DEVICE = "which GPU a row is of: no column names it, and all rows are taken for one; add index to --query-gpu"
REASON_CELLS = ("Active", "Not Active")  # what else stands there is no reading
REASON_COLUMN = re.compile(r"clocks_(?:throttle|event)_reasons\.(\w+)")
# DCGM's blank, not found, not supported, not permitted of 32 and of 64 bits, and of a floating-point number.
BLANKS = (range(0x7FFFFFF0, 0x80000000), range(0x7FFFFFFFFFFFFFF0, 0x8000000000000000 + 1), range(2**47, 2**47 + 4))
DCGM, DMON, CSV = "DCGM page", "nvidia-smi dmon", "nvidia-smi CSV"  # kinds of text
_BY_DCGM = {theirs: (ours, factor) for ours, each in NAMES.items() for theirs, factor in each.dcgm}
_BY_DMON = {theirs: ours for ours, each in NAMES.items() for theirs in each.dmon}
_BY_QUERY = {theirs: ours for ours, each in NAMES.items() for theirs in each.query}
_MOMENTS = ("%Y/%m/%d %H:%M:%S.%f", "%Y/%m/%d %H:%M:%S", "%Y%m%d %H:%M:%S", "%b %d %H:%M:%S %Y")
NO_ZONE = "nvidia-smi writes no zone: its times are read as UTC"


class Reading(NamedTuple):
    """One value of one sensor, in the unit of `NAMES`."""

    ns: int | None  # of the wall clock; None where the text has no moment
    device: str  # "GPU 0"
    name: str
    value: float


@dataclass(slots=True)
class Sensors:
    """Readings in the order of the text, and what it has that was not read, with the reason."""

    kind: str
    readings: list[Reading] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def values(self, name: str, device: str | None = None) -> list[float]:
        return [each.value for each in self.readings if each.name == name and device in (None, each.device)]

    @property
    def devices(self) -> list[str]:
        return list(dict.fromkeys(each.device for each in self.readings))

    @property
    def has_moments(self) -> bool:
        return any(each.ns is not None for each in self.readings)

    def rows(self, ns: int | None = None, shift_ns: int = 0) -> list[dict[str, Any]]:
        """As rows of the table `sensors`, by the clock of a run that is `shift_ns` ahead of the wall clock. `ns`: by
        the run's clock, of readings without a moment; where it is None they are left out."""
        return [
            {"ns": at, "device": each.device, "name": each.name, "value": each.value}
            for each in self.readings
            if (at := ns if each.ns is None else each.ns + shift_ns) is not None
        ]


def read_sensors(text: str, ns: int | None = None, zone: tzinfo = UTC) -> Sensors | None:
    """The readings of a text; None where it is of none of these writers. `ns`: when a page was read. `zone`: of the
    local times that nvidia-smi writes."""
    lines = [line.rstrip("\r") for line in text.splitlines()]
    if any(line.startswith("DCGM_FI_") for line in lines):
        return _of_dcgm(lines, ns)
    header = next((at for at, line in enumerate(lines) if is_header(line)), None)
    if header is None:
        return None
    return (_of_dmon if _is_dmon(lines[header]) else _of_query)(lines[header:], zone)


def is_header(line: str) -> bool:
    """Whether a line names the columns of the lines behind it."""
    return _is_dmon(line) or _is_query(line)


class SensorLines:
    """Lines of nvidia-smi as they come: the columns that were named last hold for the rows behind them."""

    def __init__(self, zone: tzinfo = UTC):
        self._zone = zone
        self.header: list[str] = []  # of dmon the units, too

    def read(self, lines: Sequence[str]) -> Sensors:
        """The readings of further lines."""
        found = read_sensors("\n".join([*self.header, *lines]), zone=self._zone)
        for line in lines:
            if is_header(line):
                self.header = [line]
            elif line.startswith("#") and len(self.header) == 1:
                self.header.append(line)
        return found or Sensors("")


def _of_dcgm(lines: Iterable[str], ns: int | None) -> Sensors:
    found = Sensors(DCGM)
    unread: set[str] = set()
    for line in lines:
        if not line.startswith("DCGM_FI_"):
            continue
        try:
            samples = [each for family in text_string_to_metric_families(line + "\n") for each in family.samples]
        except ValueError:
            unread.add(f"{line[:40]}: no sample of Prometheus' text")
            continue
        for sample in samples:
            if sample.name not in _BY_DCGM:
                unread.add(f"{sample.name}: its unit is not known here")
            elif not _is_blank(sample.value):
                ours, factor = _BY_DCGM[sample.name]
                at = ns if sample.timestamp is None else int(float(sample.timestamp) * 1e9)
                found.readings.append(Reading(at, _dcgm_device(sample.labels), ours, sample.value * factor))
    found.unread = sorted(unread)
    return found


def _dcgm_device(labels: Mapping[str, str]) -> str:
    """A device, or a part of one; of several machines on a page with its machine."""
    part = f" instance {labels['GPU_I_ID']}" if labels.get("GPU_I_ID") else ""
    host = labels.get("Hostname") or labels.get("instance") or ""
    return f"GPU {labels.get('gpu', labels.get('UUID', '?'))}{part}" + (f" of {host}" if host else "")


def _is_blank(value: float) -> bool:
    return not math.isfinite(value) or (value == int(value) and any(int(value) in each for each in BLANKS))


def _is_dmon(line: str) -> bool:
    words = line.removeprefix("#").split()
    return line.startswith("#") and "gpu" in words and any(word in _BY_DMON for word in words)


def _of_dmon(lines: Sequence[str], zone: tzinfo) -> Sensors:
    """A header of names and one of units come again after some rows; the columns hold for the rows behind them."""
    found = Sensors(DMON)
    unread: set[str] = set()
    names: list[str] = []
    units: list[str] = []
    for before, line in pairwise(["", *lines]):
        words = line.removeprefix("#").split()
        if _is_dmon(line):
            names, units = words, []
        elif line.startswith("#") and _is_dmon(before):
            units = words
        elif words and len(words) == len(names) == len(units) and not line.startswith("#"):
            cells = dict(zip(names, words, strict=True))
            day, clock = cells.get("Date"), cells.get("Time")
            moment = moment_of(f"{day} {clock}", zone) if day and clock else None
            for name, unit, cell in zip(names, units, words, strict=True):
                if (ours := _BY_DMON.get(name)) is not None:
                    _take(found, unread, moment, f"GPU {cells['gpu']}", ours, name, cell, unit.removeprefix("GPM:"))
    found.unread = sorted(unread)
    return found


def _is_query(line: str) -> bool:
    names = [_column(cell)[0] for cell in line.split(",")]
    return len(names) > 1 and any(name in _BY_QUERY for name in names)


def _column(cell: str) -> tuple[str, str]:
    """`power.draw [W]` → its name and its unit."""
    name, _, unit = cell.strip().partition(" [")
    return name, unit.rstrip("]")


def _of_query(lines: Sequence[str], zone: tzinfo) -> Sensors:
    found = Sensors(CSV)
    unread: set[str] = set()
    columns: list[tuple[str, str]] = []
    for cells in csv.reader(lines, skipinitialspace=True):
        if any(_column(cell)[0] in _BY_QUERY for cell in cells):
            columns = [_column(cell) for cell in cells]
            continue
        if len(cells) != len(columns):
            continue
        row = {name: cell.strip() for (name, _), cell in zip(columns, cells, strict=True)}
        moment = moment_of(row["timestamp"], zone) if "timestamp" in row else None
        named = next((row[name] for name in DEVICE_COLUMNS if row.get(name)), "")
        device = f"GPU {named or '0'}"
        if not named:
            unread.add(NO_DEVICE)
        for name, unit in columns:
            if (ours := _BY_QUERY.get(name)) is not None:
                _take(found, unread, moment, device, ours, name, row[name], unit)
        if (bits := _bits(row)) is not None:
            found.readings.append(Reading(moment, device, "throttle", float(bits)))
    found.unread = sorted(unread)
    return found


def _bits(row: Mapping[str, str]) -> int | None:
    """Reasons that have a column each; None where the row has none, or all of them in one number."""
    if any(_BY_QUERY.get(name) == "throttle" for name in row):
        return None
    named = {found[1]: cell for name, cell in row.items() if (found := REASON_COLUMN.fullmatch(name))}
    known = [REASONS[name] * (cell == "Active") for name, cell in named.items()
             if name in REASONS and cell in REASON_CELLS]  # fmt: skip
    return sum(set(known)) if known else None


def _take(
    found: Sensors, unread: set[str], ns: int | None, device: str, ours: str, theirs: str, cell: str, unit: str
) -> None:
    """One cell. Its own unit, where it has one, is that of the column."""
    number, _, behind = cell.partition(" ")
    unit = behind.strip() or unit
    try:
        value = float(int(number, 16)) if number.startswith("0x") else float(number)
    except ValueError:  # the device lacks it: -, [N/A], [Not Supported]
        return
    wanted = NAMES[ours].unit
    if not unit and wanted in UNWRITTEN:
        found.readings.append(Reading(ns, device, ours, value))
    elif WRITTEN.get(unit, ("",))[0] == wanted:
        found.readings.append(Reading(ns, device, ours, value * WRITTEN[unit][1]))
    else:
        unread.add(f"{theirs}: its unit {unit or '(none)'} is not one of {wanted}")


def moment_of(text: str, zone: tzinfo = UTC) -> int | None:
    """Nanoseconds since 1970 of a time as nvidia-smi writes it: the local one of its machine, without a zone."""
    for form in _MOMENTS:
        try:
            at = datetime.strptime(text.strip(), form).replace(tzinfo=zone)
        except ValueError:
            continue
        return int(at.replace(microsecond=0).timestamp()) * 10**9 + at.microsecond * 1000
    return None
