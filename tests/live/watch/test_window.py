"""The window in memory answers what DuckDB answers of the same scrapes in a run's table."""

import dataclasses

import pytest

from sojourn.interop.sources import scrapes
from sojourn.interop.sources.translate import names_that_grow
from sojourn.interop.sources.vllm import VLLM
from sojourn.live.watch.window import Window
from tests.metrics.foreign import VllmPage, foreign_run, steady


def fed(run, keep_s: float = 1e6) -> Window:
    window = Window(keep_s)
    rows = run.table("scrapes")
    for ns, group in rows.groupby("ns"):
        samples = [{"name": row.name, "labels": list(row.labels.items()), "value": row.value}
                   for row in group[["name", "labels", "value"]].itertuples(index=False, name="Row")]  # fmt: skip
        if len(samples) > 1:
            window.add(int(ns), samples)
        else:
            window.add_failure(int(ns))
    return window


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    place = tmp_path_factory.mktemp("run") / "run"
    return foreign_run(place, steady(40, queue_s=0.2), VllmPage(), restart_at_s=5.2, fresh=VllmPage(), silent=(7, 8.5))


def test_growth_is_that_of_the_table(run):
    window, summary = fed(run), scrapes.scrape_summary(run)
    begin, last = int(summary.answered_ns[0]), int(summary.answered_ns[-1])
    table = scrapes.growth(run, names_that_grow(VLLM), begin, last)
    wanted = {(row.name, tuple(sorted(row.labels.items()))): row.growth for row in table.itertuples(name="Row")}
    found = {(row.name, tuple(sorted(row.labels.items()))): row.growth
             for row in window.growth(begin).itertuples(name="Row")}  # fmt: skip
    # A bucket that fell is followed where other counters fell, in both.
    assert found == pytest.approx(wanted)
    assert window.restarts == 1 and window.summary(begin).failed == summary.failed == 2
    assert window.summary(begin).answered_ns.tolist() == summary.answered_ns.tolist()


def test_old_scrapes_leave_and_growth_stays_that_of_the_window(run):
    window, summary = fed(run, keep_s=3.0), scrapes.scrape_summary(run)
    begin, last = window.answered[0].ns, int(summary.answered_ns[-1])
    assert last - begin <= 3e9
    (table,) = scrapes.growth(run, ["vllm:prompt_tokens_total"], begin, last).growth
    (found,) = window.growth(begin, ["vllm:prompt_tokens_total"]).growth
    assert found == table > 0


def test_the_recorded_window_is_the_table(run):
    window = fed(run)
    rows = window.rows(window.answered[0].ns)
    assert {row["ns"] for row in rows} == set(run.table("scrapes").ns)


def test_rows_are_read_while_scrapes_and_failures_come(run):
    """The page records a window in a thread of its own."""
    window = fed(run)
    first = window.answered[0]
    samples = [{"name": name, "labels": labels, "value": value} for (name, labels), value in first.values.items()]

    class Coming(dict):
        def items(self):
            window.add(window.last_ns + 1, samples)
            window.add_failure(window.last_ns)
            return super().items()

    window._scrapes[0] = dataclasses.replace(first, values=Coming(first.values))
    assert first.ns in {row["ns"] for row in window.rows(first.ns)}


def test_failures_of_a_server_that_stays_away_are_forgotten(run):
    window = fed(run, keep_s=60.0)
    last_ns = window.last_ns
    for second in range(1, 1000):
        window.add_failure(last_ns + second * 1_000_000_000)
    assert window.summary(last_ns + 1).failed == 61


def test_an_unknown_server_is_refused():
    with pytest.raises(ValueError, match="no family of Sojourn, vLLM, SGLang"):
        Window(60).add(1, [{"name": "go_threads", "labels": [], "value": 1.0}])
