"""Whether runs may be compared at all, and which part of them where their loads differ."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sojourn.metrics.compare.dependence import FEWEST_REQUESTS
from sojourn.metrics.compare.pairs import common_beginning
from sojourn.metrics.compare.samples import RunSamples
from sojourn.metrics.compare.settings import THERE_AND_HERE, identity, load_differences, setting_differences
from sojourn.metrics.errors import InputError
from sojourn.metrics.run.directory import RunDirectory, section

SENT_LATE = "the load generator sent late"  # how a run's reason begins that is about its lateness
MOST_DIFFERENCES = 8  # in a note
MAY_BEGIN_ALIKE = {"arrivals", "measure"}  # another duration or count: the first requests may be the same
# Of `settings.identity`: what still compares where that part differs, the worst first.
STILL_COMPARES = {
    "workload": "the settings compare; latencies, attainment and tokens per second are of other requests",
    "arrivals": "the settings compare; latencies and attainment hold the effect of another load",
    "target": "the server's own records compare; a latency at the client holds the effect of another way to it",
    "model": "latencies compare two models, and not one server before and after",
    "hardware": "latencies compare two machines, and not the settings alone",
    "objectives": "latencies compare, attainment does not",
}


class Faults(NamedTuple):
    """What speaks against comparing runs: surely, and unless two single runs began alike ("" for nothing)."""

    certain: list[str]
    of_load: str


def faults_between(a: Sequence[RunDirectory], b: Sequence[RunDirectory]) -> Faults:
    """Raises InputError for a run on both sides."""
    if twice := {run.path.resolve() for run in a} & {run.path.resolve() for run in b}:
        raise InputError(f"{min(twice)} is on both sides; a run is no worse than itself, so give another one")
    metas = [(run, run.meta()) for run in (*a, *b)]
    faults = [
        f"{run.path} is not valid: {why}"
        for run, meta in metas if (why := why_not_valid(meta)) and not is_only_late(meta)
    ]  # fmt: skip
    of_load, first = "", metas[0][1]
    for run, meta in metas[1:]:
        if different := load_differences(first, meta, THERE_AND_HERE).lines():
            fault = f"{run.path} is not comparable with {metas[0][0].path}: {'; '.join(different[:5])}"
            parts = {name for name, value in identity(first).items() if value != identity(meta)[name]}
            if len(metas) == 2 and parts <= MAY_BEGIN_ALIKE and first.get("seed") == meta.get("seed"):
                of_load = fault
            else:
                faults.append("; ".join([fault, *_still_compares(parts)]))
    for side in (a, b):
        for run in side[1:]:
            if different := setting_differences(side[0].meta(), run.meta(), THERE_AND_HERE).lines():
                faults.append(f"{run.path} is no repetition of {side[0].path}: {'; '.join(different[:5])}")
    return Faults(faults, of_load)


def why_not_valid(meta: Mapping[str, Any]) -> str:
    """Why a run's latencies are not the server's; "" of one that is valid. Another tool's file does not say: then it
    was imported, and its own notes tell what it lacks."""
    if meta.get("valid") or (meta.get("valid") is None and section(meta, "imported")):
        return ""
    reasons = meta.get("invalid_reasons") or []
    return "; ".join(reasons) or "its run.json does not say that the load generator kept its schedule"


def is_only_late(meta: Mapping[str, Any]) -> bool:
    """Whether all that is wrong with a run is that its requests were sent late: then its metrics compare where they say
    the same with and without that delay."""
    reasons = meta.get("invalid_reasons") or []
    return not meta.get("valid") and bool(reasons) and all(each.startswith(SENT_LATE) for each in reasons)


def begun_alike(whole: list[list[RunSamples]], fault: str) -> tuple[list[list[RunSamples]], list[str], list[str]]:
    """Of one run a side whose loads differ by a `fault` the requests that both sent alike; the faults where these are
    few; notes. All of it where there is no fault."""
    if not fault:
        return whole, [], []
    (a,), (b,) = whole
    count = common_beginning(a, b)
    if count < FEWEST_REQUESTS:
        alike = f"of the requests, {count:,} from the first were sent alike and ended before the loads parted"
        return (
            whole,
            ["; ".join([fault, f"{alike}, and {FEWEST_REQUESTS} are needed", *_still_compares({"arrivals"})])],
            [],
        )
    part = [[side._replace(requests=side.requests.iloc[:count].reset_index(drop=True))] for side in (a, b)]
    return part, [], [
        f"the loads differ ({fault.partition(': ')[2]}): compared are the first {count:,} requests, which both sent "
        "alike and which ended before the loads parted; the later ones do not compare"
    ]  # fmt: skip


def what_differs(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """As notes: the settings that differ, and one note for all those that a side does not know."""
    found = setting_differences(dict(a), dict(b))
    shown = found.changed[:MOST_DIFFERENCES]
    more = f"; and {len(found.changed) - len(shown)} more" if len(found.changed) > len(shown) else ""
    return [*([f"what differs: {'; '.join(shown)}{more}"] if shown else []), *found.unknown()]


def _still_compares(parts: set[str]) -> list[str]:
    return [sentence for name, sentence in STILL_COMPARES.items() if name in parts][:1]
