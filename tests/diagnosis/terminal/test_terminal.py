"""The report reads well at any width: every word of the diagnosis is there, whole."""

import io
import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from sojourn.diagnosis.diagnose import diagnose
from sojourn.diagnosis.terminal.report import render
from sojourn.diagnosis.terminal.time_spent import bar, whole_percents
from tests.further import further
from tests.metrics.synthetic import synthetic_pair, synthetic_run

CASES = ["tiny_kv", "client_lag", *further("long_beside_chat", "overload", "healthy")]


def printed(diagnosis, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False).print(render(diagnosis))
    return out.getvalue()


def words(text: str) -> list[str]:
    """The words of a text without borders, in order; a line break between two words is as good as a space."""
    return re.sub(r"[│╭╮╰╯─●○?■]", " ", text).split()


def assert_holds(text: str, sentence: str) -> None:
    """Every word of the sentence stands whole somewhere in the text."""
    missing = set(words(sentence)) - set(words(text))
    assert not missing, missing


@pytest.mark.parametrize("plant", CASES)
def test_no_word_of_a_diagnosis_is_cut(tmp_path, plant):
    diagnosis = diagnose(synthetic_run(tmp_path / "run", plant=plant))
    for width in (80, 120):
        text = printed(diagnosis, width)
        assert "…" not in text and "Closure" in text
        assert max(cell_len(line) for line in text.splitlines()) <= width
        assert_holds(text, diagnosis.headline)
        for finding in diagnosis.findings:
            if finding.role == "alternative":
                assert_holds(text, finding.cause)
                continue
            said = [
                finding.title,
                finding.cause,
                finding.object,
                finding.cohort,
                finding.objective,
                finding.fix.change,
                finding.fix.gain,
                finding.probe.measurement,
                finding.probe.if_cause,
                finding.probe.if_rival,
            ]
            for sentence in [*said, *(fact.statement for fact in finding.evidence)]:
                assert_holds(text, sentence)
        for check in diagnosis.checks:
            assert_holds(text, check.title)


def test_requests_that_miss_an_objective_are_not_called_lost(tmp_path):
    diagnosis = diagnose(synthetic_run(tmp_path / "run", plant="small_batch_cap"))
    assert "of the requests miss their objective, in the request lifecycle, because the batch" in diagnosis.headline
    text = " ".join(words(printed(diagnosis, 120)))
    assert "of the waiting was for the batch cap: refused by it, or behind" in text
    assert "late requests of chat wait 4,070 ms longer for the first token than the 13 that meet the objective" in text
    assert "–: no objective, too few requests (p99 needs 662)" in text and "n<" not in text
    assert f"{diagnosis.findings[0].goodput_lost:.0%} of requests miss this SLO" in text and "lost" not in text


def test_run_without_server_records_says_why_there_is_no_finding(tmp_path):
    def forget(records):
        records.requests.clear()
        records.steps.clear()

    text = printed(diagnose(synthetic_run(tmp_path / "run", plant="overload", keep=forget)), 80)
    assert "Findings" in text
    assert "█" * 50 in text and "■ unaccounted 100%" in text
    assert_holds(text, "The cause cannot be known without the server's records: replay with `sojourn run`, or")


def test_no_latency_of_a_closed_loop_is_from_an_intended_send(tmp_path):
    run = synthetic_run(tmp_path / "run", requests=30)
    for loop in ("open", "closed"):
        run.update_meta(arrivals={"loop": loop})
        text = printed(diagnose(run), 120)
        assert ("intended" in text) == (loop == "open") == ("turn had come" not in text)


def test_comparison_names_both_runs(tmp_path):
    diagnosis = diagnose(*synthetic_pair(tmp_path, pair="benchmark_good_product_bad"))
    assert "run 0 against 1" in printed(diagnosis, 80)


def test_markup_in_a_run_is_shown_and_not_obeyed(tmp_path):
    run = synthetic_run(tmp_path / "[red]run[", plant="healthy", name="[bold]x[/bold]")
    assert "[red]run[" in printed(diagnose(run), 120)


def test_empty_run_is_printed_with_its_state(tmp_path):
    run = synthetic_run(tmp_path / "run", requests=3, keep=lambda records: records.client.clear())
    assert "inconclusive" in printed(diagnose(run), 80)


@pytest.mark.parametrize(("share", "cells"), [(0.0, 0), (0.5, 5), (1.0, 10), (1.7, 10), (-0.1, 0)])
def test_bar_is_as_long_as_its_share(share, cells):
    assert cell_len(bar(share, "red", cells=10).plain) == cells


def test_shares_in_whole_per_cent_keep_their_sum():
    assert whole_percents([0.065, 0.735, 0.185, 0.015]) == [7, 74, 18, 1]
    assert sum(whole_percents([1 / 3] * 3)) == 100 and whole_percents([]) == []
