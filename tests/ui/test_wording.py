"""Numbers keep their size and unit; text from outside stays text."""

import ast
import math
import re
from pathlib import Path

import pytest

from sojourn.ui import launch
from sojourn.ui.text import distinct, duration, label, markdown, number, percent, prose, safe, split_source


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (1240.4, "ms", "1,240 ms"), (93.04, "ms", "93.0 ms"), (0.0412, "req/s", "0.041 req/s"), (0, "", "0"),
        (-12.5, "ms", "−12.5 ms"), (None, "ms", "–"), (math.nan, "ms", "–"), (math.inf, "ms", "∞ ms"),
    ],
)  # fmt: skip
def test_number_has_three_digits_and_its_unit(value, unit, text):
    assert number(value, unit).replace("\u2009", " ").replace("\u00a0", " ") == text


def test_percent_shows_a_decimal_only_where_it_carries_the_news():
    shown = [percent(share).replace("\u2009", " ") for share in (0.713, 0.01, 0.0034, 0.9987, 1.0, 0.0)]
    assert [text.replace("\u00a0", " ") for text in shown] == ["71%", "1%", "0.3%", "99.9%", "100%", "0%"]


@pytest.mark.parametrize(
    ("clause", "is_source"),
    [
        ("`steps.parquet` `device_ns`", True), ("`ledger_*_ns`", True), ("`stage_<name>_ns`", True),
        ("`ttft_ms`", True), ("`blocks_*`", True), ("a larger `max_num_seqs`", False), ("see `--max_tokens`", False),
        ("`my_file`", False),
        ("`batch_cap` explains it", False), ("`diagnosis.json`", True),
    ],
)  # fmt: skip
def test_only_files_and_columns_of_a_run_are_sources(clause, is_source):
    words, source = split_source(f"Time by account; {clause}.")
    assert (clause.upper() in source.upper()) is is_source and (clause in words) is not is_source


def test_duration_takes_the_unit_that_fits():
    texts = [duration(ns).replace("\u2009", " ") for ns in (12, 8.4e5, 1.23e7, 4.56e9)]
    assert [text.replace("\u00a0", " ") for text in texts] == ["12 ns", "840 µs", "12.3 ms", "4.56 s"]


def test_long_names_are_told_apart_by_their_ends():
    assert distinct(["demo-9d07278d-000167", "demo-9d07278d-000031"]) == ["…000167", "…000031"]
    assert distinct(["r1", "r2"]) == ["r1", "r2"]
    assert distinct(["chat-1"]) == ["chat-1"]


def test_text_from_outside_cannot_become_markup():
    hostile = '<img src=x onerror="alert(1)">'
    assert "<" not in safe(hostile) and '"' not in safe(hostile)
    assert "<" not in label(hostile) and len(label("x" * 100, 10)) == 10
    assert "<img" not in prose(hostile) and prose("`a<b` most of it in `publish`") == (
        "<code>a&lt;b</code> most of it in <code>publish</code>"
    )
    assert markdown("*a* [b](c)") == r"\*a\* \[b\]\(c\)"
    assert markdown("_a_: `b --c_d`, <e> ` f") == r"\_a\_\: `b --c_d`, \<e\> \` f"


def test_an_option_of_the_command_line_stands_in_its_whole_command():
    """A reader of a page has no command line in front of him. Files that start processes have options as arguments."""
    ui = Path(launch.__file__).parent
    starters = ("app.py", "launch.py", "scenario_process.py", "screenshots.py", "theme.py")
    files = [file for file in ui.rglob("*.py") if file.name not in starters]
    bare, seen = [], 0
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                seen += 1
                text = re.sub(r"(`|<code>)sojourn(-probe)? [^`<]+", "", node.value)
                bare += [(file.name, text) for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", text)
                         if not re.search(rf"(var\(|[\"'; {{]){option}\s*[:)]", text)]  # fmt: skip
    assert bare == [] and seen > 1000
