"""docs/scenarios.md says what the schema says: its example is a scenario, its tables are made of it."""

import re

import pytest
import yaml

from sojourn.loadgen.scenario.document import COMMANDS, DOCUMENT, TAGS, renew_bundled, renew_tables
from sojourn.loadgen.scenario.faults import _models
from sojourn.loadgen.scenario.scenario import Scenario, load_scenario
from sojourn.loadgen.schedule.build import build_schedule

TEXT = DOCUMENT.read_text(encoding="utf-8")


def reachable(model) -> dict:
    """The models of the schema by name, from `model` down."""
    found = {model.__name__: model}
    for field in model.model_fields.values():
        for inner in _models(field.annotation):
            found |= reachable(inner)
    return found


MODELS = reachable(Scenario)


def example() -> str:
    return re.search(r"^```yaml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL).group(1)


@pytest.mark.parametrize("with_engine", [True, False])
def test_example_is_a_scenario_with_and_without_its_engine(tmp_path, with_engine):
    file = tmp_path / "my-chat.yaml"
    content = yaml.safe_load(example())
    file.write_text(example() if with_engine else yaml.safe_dump({**content, "engine": {}}), encoding="utf-8")
    scenario = load_scenario(file)
    assert scenario.name == "my-chat" and bool(scenario.engine) is with_engine
    classes = {request.klass for request in build_schedule(scenario, scenario.measure.seed, "x")}
    assert classes == {"chat", "summary"}


def test_its_tables_are_those_of_the_schema():
    assert renew_tables(TEXT) == TEXT, "run `python -m sojourn.loadgen.scenario.document`"


def test_the_page_of_commands_has_the_bundled_scenarios():
    page = COMMANDS.read_text(encoding="utf-8")
    assert renew_bundled(page) == page and "| `agents` | Six agents" in page


def test_every_model_of_the_schema_has_one_table():
    tables = [name for names in re.findall(r"<!-- fields: (.*) -->", TEXT) for name in names.split(", ")]
    assert sorted(tables) == sorted({*MODELS, "Sampling"})


def test_every_key_says_what_it_means():
    keys = [(name, key) for name, model in MODELS.items() for key in model.model_fields if key not in TAGS]
    assert [(name, key) for name, key in keys if not MODELS[name].model_fields[key].description] == []


@pytest.mark.parametrize(
    "row",
    [
        "| `timeout_s` | number | `120` | > 0, ≤ 86,400 | from the moment",
        "| `connect_timeout_s` | number | `null` | > 0, ≤ 86,400 | from",  # optional
        "| `tokens` | integer | required | ≥ 1, ≤ 5,000,000 | `around`: the middle",  # not as `fixed` has it
        "| `at_most_s` | number | `86400` | > 0, ≤ 86,400 | `exponential`, `lognormal`: cuts",
        '| `process` | `"phases"` or `"silence"` | required |  |  |',
        "| `extra_body` | object | `{}` |  | further keys",
        "| `think_time_s` | [a time](#a-time) | `null` |  | from",
        "| `seed` | integer | `0` | ≥ 0, < 2^63 | of",
    ],
)
def test_a_row_has_type_default_bounds_and_who_has_it(row):
    assert f"\n{row}" in TEXT
