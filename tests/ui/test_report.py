"""The report is one file, loads nothing, and shows hostile names as text."""

import re
from html.parser import HTMLParser

import msgspec
import pytest

from sojourn.metrics.request.latencies import DEFINITIONS
from sojourn.metrics.run.directory import RunDirectory
from sojourn.ui.markup import fragments
from sojourn.ui.markup.results import estimate, latency_table
from sojourn.ui.markup.run_report import render, write_report
from sojourn.ui.run_data import load
from tests.ui.conftest import HOSTILE_ID

SECTIONS = ("Goodput", "Where the time went", "Findings", "Slowest requests", "Steps", "How it was measured")


class Page(HTMLParser):
    """Tags, what they load, and the text outside of scripts and styles."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.text = ""
        self.handlers: list[str] = []
        self._silent = False
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self._silent = tag in ("script", "style")
        for name, value in attributes:
            if name in ("src", "href", "data", "action", "srcset"):
                self.loads.append(value or "")
            if name.startswith("on"):
                self.handlers.append(name)

    def handle_endtag(self, tag):
        self._silent = False

    def handle_data(self, data):
        self.text += "" if self._silent else data


@pytest.fixture(scope="module")
def chat_page(runs, chat, tmp_path_factory) -> str:
    path = write_report(RunDirectory(runs / "chat"), chat.diagnosis, tmp_path_factory.mktemp("report") / "report.html")
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]
    return path.read_text(encoding="utf-8")


def test_report_is_one_file_that_loads_nothing(chat_page):
    page = Page(chat_page)
    assert [target for target in page.loads if not target.startswith(("#", "data:,"))] == []
    assert "link" in page.tags and "iframe" not in page.tags and "@import" not in chat_page.split("<script>")[0]
    assert chat_page.count("plotly.js v") <= 1


def test_report_tells_the_whole_story_in_the_common_words(chat_page, chat):
    page = Page(chat_page)
    for words in (*SECTIONS, chat.diagnosis.headline, "Closure", "Seed and validity", "Versions", "Hardware"):
        assert words in page.text, words
    for found in chat.diagnosis.findings:
        assert found.cause in page.text and found.fix.change in page.text


def test_report_has_every_latency_with_interval_definition_and_steadiness(chat_page, chat):
    page, measured = Page(chat_page), chat.diagnosis.results
    assert f"Steady state: {measured.steady.verdict}" in page.text and "Deadlines of tokens" in page.text
    for row in measured.latencies:
        known = DEFINITIONS[row.name]
        shown = re.sub("<[^>]*>", "", estimate(row.quantiles["p50"]))
        for words in (known.title, known.meaning, known.origin, shown):
            assert words in page.text, words


def test_no_latency_of_a_closed_loop_is_from_an_intended_send(chat):
    closed = msgspec.structs.replace(chat.diagnosis.results, closed=True)
    for measured in (chat.diagnosis.results, closed):
        text = latency_table(measured)
        assert ("intended" in text) == (measured is not closed) == ("turn had come" not in text)


def test_hostile_names_stay_text(runs, chat):
    run = load(runs / "hostile")
    diagnosis = run.diagnosis or chat.diagnosis
    hostile = msgspec.structs.replace(diagnosis, headline=HOSTILE_ID, warnings=[HOSTILE_ID], findings=[
        msgspec.structs.replace(found, cause=HOSTILE_ID, cohort=HOSTILE_ID, object=HOSTILE_ID)
        for found in chat.diagnosis.findings
    ])  # fmt: skip
    rendered = render(load(runs / "hostile", hostile))
    page = Page(rendered)
    # Besides its figures: data and script of the moving parts, diagnosis and summary, plotly, colours, its script.
    figures = page.tags.count("script") - 7
    assert "img" not in page.tags and page.handlers == []
    assert figures == rendered.count('class="plotly-graph-div"') > 5
    assert HOSTILE_ID in page.text
    assert "<script>alert" not in rendered


def test_report_of_a_foreign_server_and_of_an_empty_run_says_what_is_missing(runs):
    foreign = Page(render(load(runs / "foreign")))
    assert "The server recorded no step" in foreign.text
    assert "No symptom of this run has a cause to name" in foreign.text
    late = msgspec.structs.replace(load(runs / "foreign").diagnosis, state="degraded")
    assert "The cause cannot be known without the server's records" in Page(render(load(runs / "foreign", late))).text
    scraped = Page(render(load(runs / "vllm")))
    assert "not visible in vLLM's metrics" in scraped.text and "What its own metrics showed" in scraped.text
    empty = Page(render(load(runs / "empty")))
    assert "No request has been recorded yet" in empty.text and "not recorded" in empty.text


def test_error_of_the_load_generator_stands_beside_the_figures_where_one_recorded():
    found = {
        "streams": 250.0, "chunks_per_s": 20.0, "processes": 1, "stamp_p99_ms": 0.3, "ttft_p99_ms": 0.4,
        "itl_p99_ms": 0.21, "worst_p99_ms": 0.4, "bound_ms": 5.0, "company": "<b>other</b> work",
    }  # fmt: skip
    page = Page(fragments.client_error({"client_error": {"calibration": found}}))
    assert "±0.4 ms (p99) at this load, 250 streams of 20 chunks/s; TTFT ±0.4, ITL ±0.2" in page.text
    assert "<b>other</b> work" in page.text and "b" not in page.tags
    uncalibrated = Page(fragments.client_error({"client_error": {"lag_p50_ms": 0.1}}))
    assert "not calibrated; run sojourn calibrate client" in uncalibrated.text and "code" in uncalibrated.tags
    assert fragments.client_error({"client_error": None}) == fragments.wrap("")
