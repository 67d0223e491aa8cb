"""docs/api.md says what the models that check requests say."""

import re

import httpx
import pytest

from sojourn.engine.server.api_reference import BODIES, DOCUMENT, renew_tables, tables, unsupported_tables
from sojourn.engine.server.openai import protocol, tools
from sojourn.engine.server.openai import structured_output as structured
from sojourn.engine.techniques.grammar.worker import CPU_SECONDS

TEXT = DOCUMENT.read_text(encoding="utf-8")


def test_its_tables_are_those_of_the_models():
    assert renew_tables(TEXT) == TEXT, "run `python -m sojourn.engine.server.api_reference`"


def test_it_has_a_table_for_every_model_and_every_list_of_fields_that_only_pass():
    told = re.findall(r"<!-- (fields|unsupported): (\w+) -->", TEXT)
    assert sorted(told) == sorted(
        [("fields", name) for name in tables()] + [("unsupported", name) for name in unsupported_tables()]
    )


BY_SETTING = {"POST /v1/load_lora_adapter", "POST /v1/unload_lora_adapter"}  # with lora_runtime_loading


def test_it_tells_of_every_endpoint(api_server):
    paths = httpx.get(f"{api_server.url}/openapi.json").json()["paths"]
    routes = {f"{method.upper()} {path.replace('{name}', '{id}')}" for path in paths for method in paths[path]}
    assert {route for route in routes if route.startswith("POST")} == set(BODIES) - BY_SETTING
    assert {route for route in routes if f"`{route}`" not in TEXT} == set()


def test_every_field_of_a_model_says_what_it_means():
    for model in BODIES.values():
        assert [name for name, field in model.model_fields.items() if not field.description] == []


@pytest.mark.parametrize(
    "said",
    [
        f"at most {protocol.MAX_PROMPTS} prompts, {protocol.MAX_CHOICES} choices",
        f"and {protocol.MAX_SEQUENCES} sequences",
        f"at most {structured.MAX_GRAMMAR_BYTES:,} bytes, {structured.MAX_SCHEMA_DEPTH} objects",
        f"and {structured.MAX_CHOICE_OPTIONS:,} choices",
        f"At most {tools.MAX_TOOLS} functions, together {tools.MAX_TOOL_BYTES:,} bytes",
        f"each schema nested {tools.MAX_SCHEMA_DEPTH} deep",
        f"more than {CPU_SECONDS:g} s of CPU time",
    ],
)
def test_the_bounds_in_its_prose_are_those_of_the_code(said):
    assert said in " ".join(TEXT.split())
