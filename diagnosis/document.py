"""The tables of causes in `docs/diagnosis.md`, made from the declarations of the causes.

The prose around them is written by hand. A table stands between `<!-- NAME -->` and `<!-- end -->`.
"""

import re
from collections import Counter
from importlib import import_module
from pathlib import Path

from sojourn.diagnosis import causes
from sojourn.diagnosis.causes import CAUSES
from sojourn.diagnosis.evidence import Means, Records
from sojourn.diagnosis.symptom_tree.complaints import COMPLAINTS
from sojourn.metrics.ledger import LIFECYCLES

DOCUMENT = Path(__file__).parents[1] / "docs" / "diagnosis.md"
_TABLE = re.compile(r"(<!-- ([a-z ]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def tables() -> dict[str, str]:
    return {
        "causes": _table(
            ("key", "lifecycle", "object", "kind", "what is found", "rival"),
            [(f"`{each.key}`", each.lifecycles[0], each.object, each.kind, _what_is_found(each.key), each.rival)
             for lifecycle in ("client", *LIFECYCLES) for each in CAUSES.values()
             if Records in each.reads and each.lifecycles[0] == lifecycle],
        ),
        "causes by means": _table(
            ("cause", "what vLLM's or SGLang's metrics show"),
            [(f"`{key}`", _in_a_cell(each.reads[Means].explain.__doc__) or _what_is_found(key))
             for key, each in CAUSES.items() if Means in each.reads],
        ),
        "complaints": _table(
            ("complaint", "name", "causes in each lifecycle"),
            [(each.words, f"`{each.symptom}`", _lifecycles(each.symptom)) for each in COMPLAINTS],
        ),
    }  # fmt: skip


def renew(document: str) -> str:
    """The document with current tables. Raises KeyError for a table that is none of these."""
    found = tables()
    return _TABLE.sub(lambda place: place[1] + found[place[2]] + place[4], document)


def _what_is_found(key: str) -> str:
    """The first line of the cause's file."""
    return _in_a_cell(import_module(f"{causes.__name__}.{key}").__doc__)


def _in_a_cell(sentence: str | None) -> str:
    text = " ".join((sentence or "").split()).removesuffix(".")
    return text[:1].lower() + text[1:]


def _lifecycles(symptom: str) -> str:
    """By the number of their causes."""
    counts = Counter(each.lifecycles[0] for each in CAUSES.values() if symptom in each.complaints)
    return ", ".join(f"{lifecycle} {count}" for lifecycle, count in counts.most_common())


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(cells)} |\n" for cells in (head, *rows)]
    return "".join([lines[0], "|" + "---|" * len(head) + "\n", *lines[1:]])


if __name__ == "__main__":
    DOCUMENT.write_text(renew(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
