"""docs/scenarios.md says what the schema says: its example is a scenario, its tables have every key as it is."""

import re
from pathlib import Path
from typing import get_args

import pytest
import yaml

from sojourn.loadgen.scenario.arrivals import process_table
from sojourn.loadgen.scenario.faults import _models, _tag_of
from sojourn.loadgen.scenario.scenario import Scenario, load_scenario
from sojourn.loadgen.schedule.build import build_schedule

DOCUMENT = (Path(__file__).parents[3] / "docs" / "scenarios.md").read_text(encoding="utf-8")
HEADING_OF = {
    "Scenario": "Top level", "Target": "target", "Workload": "workload", "RequestClass": "A class",
    "Variant": "A class", "PrefixTree": "A prefix tree", "Session": "A session", "Objective": "objectives",
    "Measure": "measure", "FleetBlock": "fleet",
    **dict.fromkeys(("FixedTurns", "UniformTurns", "GeometricTurns"), "A number of turns"),
    **dict.fromkeys(("FixedSeconds", "UniformSeconds", "ExponentialSeconds", "LognormalSeconds"), "A time"),
}  # fmt: skip
SIGNS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}


def reachable(model) -> dict:
    """The models of the schema by name, from `model` down."""
    found = {model.__name__: model}
    for field in model.model_fields.values():
        for inner in _models(field.annotation):
            found |= reachable(inner)
    return found


def heading_of(name: str) -> str:
    """The heading of the table of a model. A process or a length stands under the heading that lists its name."""
    headings = re.findall(r"^#+ (.*)$", DOCUMENT, re.MULTILINE)
    named = [each for each in headings if _tag_of(MODELS[name]) in each.split(", ")] or ["none"]
    return HEADING_OF.get(name) or named[0 if "process" in MODELS[name].model_fields else -1]


MODELS = reachable(Scenario)


def rows_under(heading: str) -> dict[str, list[str]]:
    """Cells by key of the table below a heading: unit, default, bounds, meaning."""
    section = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", DOCUMENT, re.MULTILINE | re.DOTALL).group(1)
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", section, re.MULTILINE)
    return {key: [cell.strip() for cell in rest.split("|")] for key, rest in rows}


def example() -> str:
    return re.search(r"^```yaml\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL).group(1)


@pytest.mark.parametrize("with_engine", [True, False])
def test_example_is_a_scenario_with_and_without_its_engine(tmp_path, with_engine):
    file = tmp_path / "my-chat.yaml"
    content = yaml.safe_load(example())
    file.write_text(example() if with_engine else yaml.safe_dump({**content, "engine": {}}), encoding="utf-8")
    scenario = load_scenario(file)
    assert scenario.name == "my-chat" and bool(scenario.engine) is with_engine
    classes = {request.klass for request in build_schedule(scenario, scenario.measure.seed, "x")}
    assert classes == {"chat", "summary"}


def test_every_model_of_the_schema_has_a_table():
    assert [name for name in MODELS if heading_of(name) == "none"] == [] and set(HEADING_OF) <= set(MODELS)


def test_table_of_arrival_processes_is_made_of_the_registry():
    assert f"\n\n{process_table()}\n\n" in DOCUMENT


@pytest.mark.parametrize("heading", dict.fromkeys(map(heading_of, MODELS)))
def test_table_has_the_keys_of_the_schema_and_no_others(heading):
    expected = {key for name, model in MODELS.items() if heading_of(name) == heading for key in model.model_fields}
    assert set(rows_under(heading)) == expected


@pytest.mark.parametrize("name", MODELS)
def test_table_has_the_defaults_and_bounds_of_the_schema(name):
    rows = rows_under(heading_of(name))
    for key, field in MODELS[name].model_fields.items():
        _, default, bounds, _ = rows[key]
        if field.is_required():
            assert default == "required" or (name, key) == ("Scenario", "name"), key  # load_scenario gives the name
        elif isinstance(field.default, bool):
            assert default == f"`{str(field.default).lower()}`", key
        elif isinstance(field.default, int | float):
            assert default == f"{field.default:g}", key
        elif isinstance(field.default, str) and field.default:
            assert default == f"`{field.default}`", key
        else:
            assert default != "required", key
        for limit in field.metadata:
            for attribute, sign in SIGNS.items():
                if (bound := getattr(limit, attribute, None)) is not None:
                    written = "2^63" if bound == 2**63 else f"{bound:,}"
                    assert f"{sign} {written}" in bounds.split(", "), key
            for attribute in ("min_length", "max_length"):
                if (bound := getattr(limit, attribute, None)) is not None:
                    assert re.search(rf"(?<![\d,]){bound:,}(?![\d,])", bounds), key
        for choice in get_args(field.annotation):
            if isinstance(choice, str):
                assert f"`{choice}`" in bounds, key
