"""The tables of docs/scenarios.md, from the schema of a scenario file, and of bundled scenarios in docs/commands.md.

`python -m sojourn.loadgen.scenario.document` renews them.

The prose around them is written by hand. A table stands between `<!-- fields: NAME, NAME -->` and `<!-- end -->`. A
table of several models has each field once, and says which models have it.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sojourn.loadgen.scenario.arrivals import CLOSED_PROCESSES, PROCESSES, process_name
from sojourn.loadgen.scenario.scenario import Scenario, bundled_scenarios, load_scenario
from sojourn.loadgen.scenario.workload import Sampling
from sojourn.metrics.field_table import FieldRow, as_table, field_rows
from sojourn.metrics.request.presets import table_of_presets

DOCS = Path(__file__).parents[2] / "docs"
DOCUMENT, COMMANDS = DOCS / "scenarios.md", DOCS / "commands.md"
TAGS = ("process", "distribution")  # the fields by which a file chooses one of several models
_TABLE = re.compile(r"(<!-- fields: ([\w, ]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_BUNDLED = re.compile(r"(<!-- scenarios -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_PRESETS = re.compile(r"(<!-- presets -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_PROCESSES = re.compile(r"(<!-- fields of each process -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def models() -> dict[str, dict[str, Any]]:
    """Name → JSON schema of each model that a scenario file can hold; sampling stands apart from who inherits it."""
    scenario = Scenario.model_json_schema()
    found = scenario.pop("$defs") | {"Scenario": scenario}
    scenario["required"].remove("name")  # `load_scenario` gives it
    for field in scenario["properties"].values():
        if isinstance(field.get("default"), dict):
            field["default"] = {}  # a block that is left out
    for schema in found.values():
        if schema["properties"].keys() > Sampling.model_fields.keys():
            schema["properties"] = {
                name: field for name, field in schema["properties"].items() if name not in Sampling.model_fields
            }
    return found | {"Sampling": Sampling.model_json_schema()}


def renew_tables(document: str) -> str:
    """The document with current tables. Raises KeyError for a table of no model."""
    found, heading_of = models(), _headings(document)

    def link(names: Sequence[str]) -> str:
        heading = "arrivals" if "process" in found[names[0]]["properties"] else heading_of[names[0]]
        return f"[{heading[0].lower()}{heading[1:]}](#{heading.lower().replace(' ', '-')})"

    def table(names: list[str]) -> str:
        rows = {name: list(field_rows(found[name], link)) for name in names}
        return as_table(next(iter(rows.values())) if len(rows) == 1 else _merged(rows))

    renewed = _TABLE.sub(lambda part: part[1] + table(part[2].split(", ")) + part[4], document)
    renewed = _PRESETS.sub(lambda part: part[1] + table_of_presets() + part[3], renewed)
    return _PROCESSES.sub(lambda part: part[1] + _process_table() + part[3], renewed)


def renew_bundled(document: str) -> str:
    lines = ["| scenario | what it shows |", "|---|---|"]
    lines += [f"| `{name}` | {load_scenario(name).description} |" for name in bundled_scenarios()]
    return _BUNDLED.sub(lambda part: part[1] + "\n".join(lines) + "\n" + part[3], document)


def _headings(document: str) -> dict[str, str]:
    """Name of a model → the heading above its table."""
    found = {}
    for part in _TABLE.finditer(document):
        heading = re.findall(r"^#+ (.*)$", document[: part.start()], re.MULTILINE)[-1]
        found |= dict.fromkeys(part[2].split(", "), heading)
    return found


def _merged(rows: dict[str, list[FieldRow]]) -> list[FieldRow]:
    """Rows of several models, each once. One that not all models have begins with their tags."""
    tag_of = {name: next(row.type for row in own if row.name in TAGS).strip('`"') for name, own in rows.items()}
    having: dict[FieldRow, list[str]] = {}
    for name, own in rows.items():
        for row in own:
            having.setdefault(row._replace(type="", meaning="") if row.name in TAGS else row, []).append(tag_of[name])
    merged = []
    for row, tags in having.items():
        if row.name in TAGS:
            merged.insert(0, row._replace(type=" or ".join(f'`"{tag}"`' for tag in tags)))
        elif len(tags) < len(rows):
            merged.append(row._replace(meaning=f"{', '.join(f'`{tag}`' for tag in tags)}: {row.meaning}"))
        else:
            merged.append(row)
    return merged


def _process_table() -> str:
    lines = ["| process | loop | arrivals |", "|---|---|---|"]
    for each in PROCESSES:
        name = process_name(each)
        loop = "closed" if name in CLOSED_PROCESSES else "open"
        meaning = " ".join(each.__doc__.split()).removeprefix("Closed loop: ")
        lines.append(f"| `{name}` | {loop} | {meaning[0].upper() if meaning[0] != '`' else '`'}{meaning[1:]} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for page, renew in ((DOCUMENT, renew_tables), (COMMANDS, renew_bundled)):
        page.write_text(renew(page.read_text(encoding="utf-8")), encoding="utf-8")
