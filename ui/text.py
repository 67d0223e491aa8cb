"""Numbers and names as people read them. Text from outside is escaped before it becomes HTML or Markdown."""

import fnmatch
import html
import math
import re
from collections import Counter
from functools import cache

from sojourn.metrics.records.tables import SCHEMAS

MINUS, THIN = "−", " "
NOTHING = "–"
SPAN = re.compile(r"`([^`]+)`")
FILE = re.compile(r".*\.(?:parquet|jsonl?)")
LATENCIES = ("ttft_ms", "ttfa_ms", "tpot_ms", "e2e_ms")  # columns that the tables' reader adds
COLUMNS = (*{name for schema in SCHEMAS.values() for name in schema.names}, *LATENCIES)


def missing(value: float | None) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def number(value: float | None, unit: str = "") -> str:
    """Three significant digits, thousands apart, the unit behind: `1,240 ms`, `0.041 req/s`; a dash for nothing."""
    if missing(value):
        return NOTHING
    size = abs(value)
    decimals = 0 if size >= 100 or value == int(value) else 1 if size >= 10 else 2 if size >= 0.1 else 3
    text = f"{value:,.{decimals}f}".replace("-", MINUS).replace("inf", "∞")  # a quantile among requests that failed
    return f"{text}{THIN}{unit}" if unit else text


def percent(share: float | None) -> str:
    """`0.713` → `71%`; a decimal below 10% and above 99%, where it carries the news."""
    if missing(share):
        return NOTHING
    value = 100 * share
    whole = abs(value - round(value)) < 1e-9
    decimals = 0 if whole or 10 <= abs(value) < 99 else 1
    return f"{value:.{decimals}f}%".replace("-", MINUS)


def duration(ns: float | None) -> str:
    """Nanoseconds in the unit that fits: `840 µs`, `12.3 ms`, `4.56 s`."""
    if missing(ns):
        return NOTHING
    for bound, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "µs")):
        if abs(ns) >= bound:
            return number(ns / bound, unit)
    return number(ns, "ns")


def safe(text: object) -> str:
    """Text from outside as HTML text or attribute."""
    return html.escape(str(text), quote=True)


def prose(text: object) -> str:
    """A sentence from outside as HTML: what stands between backticks is code."""
    return SPAN.sub(r"<code>\1</code>", safe(text))


def label(text: object, length: int = 40) -> str:
    """Text from outside as a plotly label: plotly reads a few HTML tags in labels, so they are disarmed."""
    flat = re.sub(r"\s+", " ", str(text))
    cut = flat if len(flat) <= length else flat[: length - 1] + "…"
    return cut.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def distinct(names: list[str], length: int = 18) -> list[str]:
    """Labels of different names that are different, too: what all share at their beginning, up to a separator, becomes
    `…`; where names are alike for longer than a label, their middle does, and the last resort is a number."""
    low, high = min(names, default=""), max(names, default="")  # what these two share, all share
    same = next((place for place, pair in enumerate(zip(low, high, strict=False)) if len(set(pair)) > 1), 0)
    shared = low[:same]
    cut = max(shared.rfind(mark) for mark in "-_:/.") + 1
    labels = [label(f"…{name[cut:]}" if cut > 3 else name, length) for name in names]
    if len(set(labels)) < len(set(names)):
        half = (length - 1) // 2
        labels = [
            label(name if len(name) <= length else f"{name[:half]}…{name[half + 1 - length :]}") for name in names
        ]
    return numbered(labels)


def numbered(labels: list[str]) -> list[str]:
    """The labels, with a number behind those that were there before."""
    seen: Counter[str] = Counter()
    found = []
    for each in labels:
        seen[each] += 1
        found.append(each if seen[each] == 1 else f"{each} ({seen[each]})")
    return found


def markdown(text: object) -> str:
    """Text from outside as literal Markdown, on one line; what stands between backticks is code."""
    parts = SPAN.split(re.sub(r"\s+", " ", str(text)))  # every second one stood between backticks
    parts[::2] = (re.sub(r"([\\`*_{}\[\]()#+!|<>$~:])", r"\\\1", part) for part in parts[::2])
    parts[1::2] = (f"`{part}`" for part in parts[1::2])
    return "".join(parts)


@cache
def _is_source(span: str) -> bool:
    """Whether a code span names a file of a run, or a column of its tables: `ledger_*_ns`, `blocks_<kind>`."""
    return bool(FILE.fullmatch(span) or fnmatch.filter(COLUMNS, re.sub(r"<[^>]*>", "*", span.strip())))


def split_source(caption: str) -> tuple[str, str]:
    """What a caption says to every reader, and the clauses of it that name files and columns of a run."""
    words: list[str] = []
    source: list[str] = []
    for sentence in re.split(r"(?<=[.!?]) +", caption.strip()):
        clauses = re.split(r"; ", sentence.rstrip("."))
        for found, named in ((words, False), (source, True)):
            if chosen := [clause for clause in clauses if any(map(_is_source, SPAN.findall(clause))) is named]:
                text = "; ".join(chosen)
                found.append(f"{text[0].upper()}{text[1:]}.")
    return " ".join(words), " ".join(source)
