"""What nvidia-smi printed: its table, `-q`, `dmon`, and CSV of `--query-gpu`; and a DCGM exporter's page."""

import re
from collections.abc import Iterable, Iterator

from sojourn.interop.held.given import Given
from sojourn.interop.held.held import Held, Reading, Setting
from sojourn.interop.sources.sensor_names import NAMES, REASONS, WRITTEN
from sojourn.interop.sources.sensors import DCGM, DMON, NO_ZONE, REASON_CELLS, moment_of, read_sensors

FIRST_ROW = re.compile(r"\|\s+(?P<index>\d+)\s+(?P<name>\S.*?)\s+(?:On|Off|WDDM|TCC|MCDM|N/A)\s*\|\s*[0-9A-Fa-f]{4,8}:")
SECOND_ROW = re.compile(
    r"\|\s*(?:\d+%|N/A|ERR!)\s+(?P<temperature>\d+)C\s+(?:P\d+|N/A)\s+(?P<power>\d+|N/A)W?\s*/\s*(?P<power_limit>\d+|N/A)W?"
    r"\s*\|\s*(?P<memory_used>\d+)MiB\s*/\s*(?P<memory_total>\d+)MiB\s*\|\s*(?P<gpu_utilisation>\d+|N/A)%?\s"
)
BANNER = re.compile(r"\| NVIDIA-SMI (?P<smi>\S+) +(?:KMD Version|Driver Version): (?P<driver>[\d.]+)")
QUERY = "==============NVSMI LOG=============="
DEVICE = re.compile(r"GPU (?P<bus>[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d)")
PAIR = re.compile(r"(?P<indent> *)(?P<name>[^:]+?) *: (?P<value>.*)")
HEAD = re.compile(r"(?P<indent> *)(?P<name>[A-Z][\w /()]+?) *$")
TABLE = {"temperature": "C", "power": "W", "power_limit": "W", "memory_used": "MiB", "memory_total": "MiB",
         "gpu_utilisation": "%"}  # fmt: skip
# Section and name of `-q`, by version → ours.
FIELDS = {
    ("Utilization", "Gpu"): "gpu_utilisation", ("Utilization", "GPU"): "gpu_utilisation",
    ("Utilization", "Memory"): "memory_copy", ("FB Memory Usage", "Total"): "memory_total",
    ("FB Memory Usage", "Used"): "memory_used", ("FB Memory Usage", "Free"): "memory_free",
    ("Temperature", "GPU Current Temp"): "temperature", ("Temperature", "Gpu"): "temperature",
    ("Temperature", "Memory Current Temp"): "memory_temperature", ("Clocks", "SM"): "sm_clock",
    ("Clocks", "Memory"): "memory_clock", ("Max Clocks", "SM"): "sm_clock_limit",
    ("PCI", "Tx Throughput"): "pcie_tx", ("PCI", "Rx Throughput"): "pcie_rx",
    **{(section, name): "power" for section in ("Power Readings", "GPU Power Readings")
       for name in ("Power Draw", "Average Power Draw", "Instantaneous Power Draw")},
    **{(section, name): "power_limit" for section in ("Power Readings", "GPU Power Readings")
       for name in ("Enforced Power Limit", "Current Power Limit", "Power Limit")},
}  # fmt: skip
REASONS_HEAD = ("Clocks Throttle Reasons", "Clocks Event Reasons")
DATE = re.compile(r"[A-Z][a-z]{2} ([A-Z][a-z]{2} +\d{1,2} \d\d:\d\d:\d\d \d{4})")
OPEN = "how much of a device worked: GPU-Util says that some kernel ran, not that the device was full; "
ONE_LOOK = f"{OPEN}give `nvidia-smi dmon -s pucvmet` or a DCGM exporter's page"
# What the same tool shows of it, where its own text was given already
MORE = {DMON: f"{OPEN}`nvidia-smi dmon --gpm-metrics=2,10` shows it on Hopper and later",
        DCGM: f"{OPEN}the exporter's field DCGM_FI_PROF_SM_ACTIVE shows it"}  # fmt: skip


def recognises(given: Given) -> bool:
    text = given.plain
    if BANNER.search(text) is not None or QUERY in text:
        return True
    return read_sensors("\n".join(text.split("\n", 400)[:400])) is not None


def read(given: Given) -> list[Held]:
    text = given.plain
    if BANNER.search(text) is None and QUERY not in text:
        return [_of_series(given, text)]
    readings = [*_table(text.split("\n")), *_query(text.split("\n"))]
    settings: dict[str, Setting] = {}
    if (banner := BANNER.search(text)) is not None:
        settings["driver"] = banner["driver"]
    if (driver := re.search(r"^Driver Version +: (\S+)", text, re.MULTILINE)) is not None:
        settings["driver"] = driver[1]
    cuda = re.search(r"CUDA (?:UMD )?Version *: +(\d[\d.]*)", text)
    settings |= {"cuda": cuda[1]} if cuda is not None else {}
    names = [found["name"] for line in text.split("\n") if (found := FIRST_ROW.match(line)) is not None]
    names += re.findall(r"^ +Product Name +: (.+?) *$", text, re.MULTILINE)
    if names:
        settings["gpu"] = ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
    return [Held(
        kind="nvidia-smi", name=given.name, settings=settings, sensors=readings,
        notes=[NO_ZONE] if any(each.ns is not None for each in readings) else [],
        missing=[ONE_LOOK] if readings else ["readings: no device's rows are whole in it", ONE_LOOK],
    )]  # fmt: skip


def _of_series(given: Given, text: str) -> Held:
    found = read_sensors(text)
    if found is None:
        raise ValueError("no sensor is known in it")
    readings = [Reading(device=each.device, name=each.name, unit=NAMES[each.name].unit, value=each.value, ns=each.ns)
                for each in found.readings]  # fmt: skip
    activity = any(each.name in ("sm_activity", "engine_activity") for each in readings)
    zone = [NO_ZONE] if found.has_moments and found.kind != DCGM else []
    return Held(kind=found.kind, name=given.name, sensors=readings, notes=[*zone, *found.unread],
                missing=[] if activity else [MORE.get(found.kind, ONE_LOOK)])  # fmt: skip


def _moment(text: str) -> int | None:
    found = DATE.search(text)
    return None if found is None else moment_of(found[1])


def _table(lines: Iterable[str]) -> Iterator[Reading]:
    ns, device = None, None
    for line in lines:
        if DATE.match(line.strip()):
            ns = _moment(line)
        if (first := FIRST_ROW.match(line)) is not None:
            device = f"GPU {first['index']}"
        elif device is not None and (second := SECOND_ROW.match(line)) is not None:
            for name, unit in TABLE.items():
                if second[name] != "N/A":
                    value = WRITTEN[unit][1] * float(second[name])
                    yield Reading(device=device, name=name, unit=NAMES[name].unit, value=value, ns=ns)
            device = None


def _query(lines: Iterable[str]) -> Iterator[Reading]:
    """The tree of `-q`: a section's pairs stand deeper than its head."""
    ns, device, number = None, None, -1
    heads: list[tuple[int, str]] = []
    bits: int | None = None
    for line in lines:
        if (bus := DEVICE.match(line)) is not None:
            if device is not None and bits is not None:
                yield Reading(device=device, name="throttle", unit=NAMES["throttle"].unit, value=float(bits), ns=ns)
            number, bits, heads = number + 1, None, []
            device = f"GPU {bus['bus']}"
        elif (pair := PAIR.fullmatch(line)) is not None:
            heads = [head for head in heads if head[0] < len(pair["indent"])]
            if pair["name"].strip() == "Timestamp":
                ns = _moment(pair["value"])
            section = heads[-1][1] if heads else ""
            if section in REASONS_HEAD:
                bits = _with_reason(bits, pair)
            elif device is not None:
                yield from _field(device, heads, pair, ns)
        elif (head := HEAD.fullmatch(line)) is not None:
            indent = len(head["indent"])
            heads = [*(each for each in heads if each[0] < indent), (indent, head["name"])]
    if device is not None and bits is not None:
        yield Reading(device=device, name="throttle", unit=NAMES["throttle"].unit, value=float(bits), ns=ns)


def _with_reason(bits: int | None, pair: "re.Match[str]") -> int | None:
    """`bits` with the reason that a line names; a device that does not say gives none."""
    bit, stated = REASONS.get(pair["name"].strip().lower().replace(" ", "_")), pair["value"].strip()
    if bit is None or stated not in REASON_CELLS:
        return bits
    return (bits or 0) | (bit if stated == "Active" else 0)


def _field(device: str, heads: list[tuple[int, str]], pair: "re.Match[str]", ns: int | None) -> Iterator[Reading]:
    ours = next((FIELDS[key] for _, head in heads if (key := (head, pair["name"].strip())) in FIELDS), None)
    number, _, unit = pair["value"].strip().partition(" ")
    known = WRITTEN.get(unit.strip())
    if ours is None or known is None or not re.fullmatch(r"\d+(?:\.\d+)?", number) or known[0] != NAMES[ours].unit:
        return
    yield Reading(device=device, name=ours, unit=known[0], value=known[1] * float(number), ns=ns)
