"""The tables of docs/faults.md, from the classes of the faults.

`python -m sojourn.loadgen.faults.document` renews them. A table stands between `<!-- faults: PLACE -->` and
`<!-- end -->`.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args, get_origin

from pydantic import BaseModel

from sojourn.engine.faults.plan import FAULTS
from sojourn.loadgen.faults.planted import SurroundingFault

DOCUMENT = Path(__file__).parents[2] / "docs" / "faults.md"
AROUND = {get_args(each.model_fields["fault"].annotation)[0]: each for each in get_args(get_args(SurroundingFault)[0])}
PLACES: Mapping[str, Mapping[str, type[BaseModel]]] = {"inside": FAULTS, "around": AROUND}
OUTSIDE = ("from_s", "until_s", "fault")  # of the table: times are of nearly all, and the name has a column
_TABLE = re.compile(r"(<!-- faults: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def renew_tables(document: str) -> str:
    """The document with current tables. Raises KeyError for a table of no place."""
    return _TABLE.sub(lambda part: part[1] + _table(PLACES[part[2]]) + part[4], document)


def _table(faults: Mapping[str, type[BaseModel]]) -> str:
    lines = ["| fault | values | what happens |", "|---|---|---|"]
    for name, fault in faults.items():
        values = [_value(key, field.annotation) for key, field in fault.model_fields.items() if key not in OUTSIDE]
        lines.append(f"| `{name}` | {', '.join(values)} | {' '.join(fault.__doc__.split())} |")
    return "\n".join(lines) + "\n"


def _value(key: str, annotation: object) -> str:
    """A value's name, with its choices where there are some."""
    if get_origin(annotation) is not Literal:
        return f"`{key}`"
    return f"`{key}` ({', '.join(f'`{choice}`' for choice in get_args(annotation))})"


if __name__ == "__main__":
    DOCUMENT.write_text(renew_tables(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
