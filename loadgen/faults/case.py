"""The file of a case: a base workload, what each severity changes in it, and the truth.

```yaml
base: chat                      # scenarios/faults/workloads/chat.yaml
description: what is planted
truths:
  - {keys: [batch_cap], lifecycles: [request], kinds: [policy], fix: {max_num_seqs: 32}}
severities:                     # the mildest first
  - {engine: {max_num_seqs: 4}}
  - {engine: {max_num_seqs: 2}}
```

A severity is a part of a scenario, laid over the base, beside `around`: faults of client and machine. A control names
`control: healthy` or `overloaded` in the place of truths, and `change` in the place of severities. A base that ends in
.yaml is a scenario file beside the case. Each run has an empty folder of its own for `kv_disk_path`, whatever it names.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from sojourn.diagnosis.score.truth import Remedy, Truth
from sojourn.diagnosis.verdict import Kind
from sojourn.loadgen.errors import ScenarioError, nearest
from sojourn.loadgen.faults.planted import OF_A_ROUTER, SurroundingFault
from sojourn.loadgen.scenario.distributions import Block
from sojourn.loadgen.scenario.faults import UniqueKeys, describe_faults, describe_yaml_error
from sojourn.loadgen.scenario.scenario import SCENARIO_FOLDER, Scenario

CASE_FOLDER = SCENARIO_FOLDER / "faults"
WORKLOAD_FOLDER = CASE_FOLDER / "workloads"
Lifecycle = Literal["client", "token", "request", "memory", "compute"]


class CaseTruth(Block):
    """One planted fault. Each list holds what counts as right, the best answer first."""

    keys: list[str] = Field(min_length=1)
    lifecycles: list[Lifecycle] = Field(min_length=1)
    kinds: list[Kind] = Field(min_length=1)
    fix: dict[str, Any] = Field(default_factory=dict, description="settings that mend it; null takes one back")
    remedies: list[dict[str, str]] = Field(default_factory=list, description="settings that would mend it as well")


class CaseFile(Block):
    base: str
    description: str = Field(min_length=1)
    truths: list[CaseTruth] = Field(default_factory=list, max_length=2)
    control: Literal["healthy", "overloaded"] | None = None
    severities: list[dict[str, Any]] = Field(default_factory=list, max_length=3)
    change: dict[str, Any] = Field(default_factory=dict, description="of a control: laid over the base")

    @model_validator(mode="after")
    def _is_fault_or_control(self):
        if (self.control is None) != bool(self.truths) or (self.control is None) != bool(self.severities):
            raise ValueError("a fault has truths and severities, a control has control; give one of the two")
        if self.truths and self.change:
            raise ValueError("change is for a control; lay it over the base in each of the severities")
        return self


@dataclass(frozen=True, slots=True)
class Variant:
    """A case at one severity: 1 is the mildest, 0 a control."""

    severity: int
    scenario: Scenario
    around: tuple[SurroundingFault, ...]
    truths: tuple[Truth, ...]
    plant: str  # in words: what was changed


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    base: str  # name of the base workload
    base_file: Path
    description: str
    control: str | None
    fixes: tuple[dict[str, Any], ...]  # one for each truth; {} where no setting mends it
    variants: tuple[Variant, ...]


class _Around(Block):
    around: list[SurroundingFault] = Field(default_factory=list)


def case_names() -> list[str]:
    """The bundled cases: first the base workloads, which are controls."""
    bases = sorted(path.stem for path in WORKLOAD_FOLDER.glob("*.yaml"))
    return bases + sorted(path.stem for path in CASE_FOLDER.glob("*.yaml"))


def load_case(path_or_name: str | Path) -> Case:
    """Reads a case file, a bundled case by its name, or a base workload, which is a healthy control. Raises
    ScenarioError, one sentence a fault."""
    path = Path(path_or_name)
    if not path.is_file():
        known = case_names()
        if str(path_or_name) not in known:
            raise ScenarioError(
                f"case {str(path_or_name)!r} is neither a file nor bundled{nearest(str(path_or_name), known)}; "
                "`sojourn dev faults list` shows the bundled ones"
            )
        workload = WORKLOAD_FOLDER / f"{path_or_name}.yaml"
        path = workload if workload.is_file() else CASE_FOLDER / f"{path_or_name}.yaml"
    document = _document(path)
    return _base_case(path, document) if "arrivals" in document and "base" not in document else _case(path, document)


def _base_case(path: Path, base: dict[str, Any]) -> Case:
    variant = _variant(path.stem, 0, base, {}, [])
    return Case(path.stem, path.stem, path, variant.scenario.description, "healthy", (), (variant,))


def _case(path: Path, document: dict[str, Any]) -> Case:
    try:
        file = CaseFile(**document)
    except ValidationError as error:
        raise ScenarioError(*[f"{path.name}: {fault}" for fault in describe_faults(error, CaseFile)]) from None
    name, base_file = path.stem, _workload_file(file.base, path)
    base = _document(base_file) | {"description": file.description}
    if file.control is not None:
        variants = [_variant(name, 0, base, file.change, [])]
    else:
        variants = [_variant(name, level, base, each, file.truths) for level, each in enumerate(file.severities, 1)]
    fixes = tuple(truth.fix for truth in file.truths)
    return Case(name, base_file.stem, base_file, file.description, file.control, fixes, tuple(variants))


def _variant(
    name: str, severity: int, base: dict[str, Any], change: dict[str, Any], truths: list[CaseTruth]
) -> Variant:
    laid = merged(base, {key: value for key, value in change.items() if key != "around"})
    where = f"{name}.yaml, severity {severity}" if severity else f"{name}.yaml"
    try:
        around = _Around(around=change.get("around", [])).around
        laid["engine"] = {key: _located(value) for key, value in laid["engine"].items()}
        scenario = Scenario(**{**laid, "name": f"{name}--{severity}"})
    except ValidationError as error:
        raise ScenarioError(*[f"{where}: {fault}" for fault in describe_faults(error, Scenario)]) from None
    for fault in around:
        if isinstance(fault, OF_A_ROUTER) and scenario.fleet is None:
            raise ScenarioError(f"{where}: {fault.fault} needs a router; add a fleet block")
    return Variant(
        severity,
        scenario,
        tuple(around),
        tuple(_truth(truth, scenario.engine) for truth in truths),
        yaml.safe_dump(change, default_flow_style=True, width=float("inf")).strip() if change else "",
    )


def _located(value: Any) -> Any:
    """The path of a settings file that lies beside the bundled cases; any other value as it is."""
    is_file = isinstance(value, str) and value.endswith(".yaml") and (CASE_FOLDER / value).is_file()
    return str(CASE_FOLDER / value) if is_file else value


def _truth(truth: CaseTruth, planted: dict[str, Any]) -> Truth:
    remedies = [
        Remedy(setting=key, direction=_direction(planted.get(key), value))
        for key, value in truth.fix.items()
        if value is not None
    ]
    remedies += [Remedy(**remedy) for remedy in truth.remedies]
    return Truth(keys=truth.keys, lifecycles=truth.lifecycles, kinds=truth.kinds, remedies=remedies)


def _direction(planted: Any, fixed: Any) -> Literal["larger", "smaller", "other"]:
    """Where a setting has to go. Numbers have an order, and a setting that was not planted has none."""
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in (planted, fixed)):
        return "larger" if fixed > planted else "smaller"
    return "other"


def merged(base: Any, change: Any) -> Any:
    """`change` laid over `base`: blocks key by key, anything else as a whole. A block over a list of blocks with a
    `klass` changes those of these names. A block with another `process` or `distribution` is another block."""
    if isinstance(base, dict) and isinstance(change, dict):
        kinds = ("process", "distribution")
        if any(kind in change and change[kind] != base.get(kind) for kind in kinds):
            return change
        return base | {key: merged(base.get(key), value) for key, value in change.items()}
    if isinstance(base, list) and isinstance(change, dict):
        names = [each.get("klass") for each in base]
        if unknown := [name for name in change if name not in names]:
            raise ScenarioError(f"the base has no klass {unknown[0]!r}; it has {', '.join(map(str, names))}")
        return [merged(each, change.get(each.get("klass"), {})) for each in base]
    return change


def _workload_file(base: str, case: Path) -> Path:
    if base.endswith(".yaml"):
        return case.parent / base
    known = sorted(path.stem for path in WORKLOAD_FOLDER.glob("*.yaml"))
    if base not in known:
        raise ScenarioError(
            f"base {base!r} is no workload{nearest(base, known)}; there are {', '.join(known)}, and files that end in "
            ".yaml beside the case"
        )
    return WORKLOAD_FOLDER / f"{base}.yaml"


def _document(path: Path) -> dict[str, Any]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), UniqueKeys)
    except OSError as error:
        raise ScenarioError(f"{path} cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ScenarioError(f"{path.name}: {describe_yaml_error(error)}") from None
    if not isinstance(content, dict):
        raise ScenarioError(f"{path.name} holds no blocks; docs/faults.md shows the form of a case")
    return content
