"""Pairs among recorded cases of planted faults: a case whose fault is only settings, and its workload without it.

`sojourn dev faults run` records both with the same arrivals. So each is a real run of the other's settings.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sojourn.diagnosis.score.truth import FAULT_FILE, FaultRecord, read_fault
from sojourn.engine.config import EngineConfig
from sojourn.metrics.errors import RunDataError
from sojourn.metrics.run.directory import RunDirectory, engine_settings, section
from sojourn.replay.settings import REPLAYED

OWN = ("name", "description", "engine")  # of a scenario: what two runs of a pair may have different
POOL = ("num_kv_blocks", "kv_cache_gib")
WHERE = ("port", "host")  # of a server: says nothing of what it computes


class Recorded(NamedTuple):
    """One finished run of a case."""

    run: RunDirectory
    fault: FaultRecord
    scenario: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Of the case with its severity, the same in each repeat."""
        return f"{self.fault.case}--{self.fault.severity}"


class PlantedPair(NamedTuple):
    """Runs of one case, those of its base with the same arrivals, and the settings that lead from one to the other."""

    name: str  # of the runs that are replayed
    settings: dict[str, Any]
    replayed: list[RunDirectory]  # one a repeat
    changed: list[RunDirectory]  # in the same order


def planted_pairs(folder: Path) -> list[PlantedPair]:
    """Every pair in both directions, by name. A repeat counts where both of its runs are whole."""
    recorded = list(_recorded(folder))
    bases = {(each.fault.case, each.fault.repeat): each for each in recorded if each.fault.base is None}
    found: dict[tuple[str, str], list[tuple[Recorded, Recorded]]] = defaultdict(list)
    for each in recorded:
        base = bases.get((each.fault.base or "", each.fault.repeat))
        if base is not None and _differ_in_settings_only(base, each):
            found[base.name, each.name].append((base, each))
            found[each.name, base.name].append((each, base))
    pairs = []
    for (name, _), repeats in sorted(found.items()):
        one, other = repeats[0]
        settings = settings_between(one, other)
        if settings:
            pairs.append(PlantedPair(name, settings, [a.run for a, _ in repeats], [b.run for _, b in repeats]))
    return pairs


def settings_between(one: Recorded, other: Recorded) -> dict[str, Any]:
    """What a replay of `one` changes to have the settings of `other`, as they were in force."""
    names = {name for each in (one, other) for name in each.scenario["engine"]}
    before, after = (_in_force(each.run.meta()) for each in (one, other))
    wanted = {name: after[name] for name in names if name in REPLAYED and before[name] != after[name]}
    if names & set(POOL):  # a size that was named, here or there: blocks say it for both
        for name in POOL:
            wanted.pop(name, None)
        wanted["num_kv_blocks"] = after["num_kv_blocks"]
    return wanted


def _recorded(folder: Path) -> Iterator[Recorded]:
    for file in sorted(folder.glob(f"*/{FAULT_FILE}")):
        try:
            run, fault = RunDirectory.open(file.parent), read_fault(file.parent)
            scenario = run.meta()["scenario"]
        except (RunDataError, KeyError):  # a run that was cut short makes no pair
            continue
        if isinstance(scenario, Mapping) and run.meta().get("valid") is not False:
            yield Recorded(run, fault, scenario)


def _differ_in_settings_only(base: Recorded, case: Recorded) -> bool:
    same = ({name: value for name, value in each.scenario.items() if name not in OWN} for each in (base, case))
    one, other = base.scenario["engine"], case.scenario["engine"]
    differing = {name for name in {*one, *other} if one.get(name) != other.get(name)} - set(WHERE)
    is_alone = "around" not in case.fault.plant
    return is_alone and next(same) == next(same) and bool(differing) and differing <= set(REPLAYED)


def _in_force(meta: Mapping[str, Any]) -> dict[str, Any]:
    found = engine_settings(dict(meta)) | {"num_kv_blocks": section(meta, "core").get("num_kv_blocks")}
    return {name: found.get(name, EngineConfig.model_fields[name].default) for name in REPLAYED}
