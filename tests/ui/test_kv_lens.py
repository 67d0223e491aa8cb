"""The lens on the page Memory: of a run with records, of one with KV events alone, and why there is none."""

from dataclasses import replace

import pytest

from sojourn.live.kv_lens.of_run import lens_of_run
from sojourn.metrics.run.directory import RunDirectory
from sojourn.ui.figures import memory
from sojourn.ui.run_data import load
from sojourn.ui.tables import kv_lens
from sojourn.ui.tables.memory import miss_ratios
from tests.live.kv_lens.recorded_runs import run_of
from tests.metrics.memory.simulated_cache import chains
from tests.ui.test_app import html, messages, opened


@pytest.fixture(scope="module")
def cached(tmp_path_factory):
    """`records` with KV events beside its records, and `events` with nothing but events."""
    folder = tmp_path_factory.mktemp("cached")
    for name in ("records", "events"):
        run_of(folder / name, chains(9, count=200), events=True)
        RunDirectory(folder / name).update_meta(objectives=[], valid=True)
    (folder / "events" / "requests.parquet").unlink()
    return folder


def test_page_shows_sizes_takers_and_blocks(cached, monkeypatch):
    app = opened(cached, "memory", "records", monkeypatch)
    lens = lens_of_run(RunDirectory(cached / "records"))
    assert not app.exception and not app.error
    assert any(lens.headline[:40] in element.value for element in app.markdown)
    shown = html(app)
    assert "no eviction" in shown and "blocks evicted for it" in shown and "of these after an eviction" in shown


def test_page_shows_a_run_of_events_alone(cached, monkeypatch):
    app = opened(cached, "memory", "events", monkeypatch)
    assert not app.exception and not app.error and "of these after an eviction" in html(app)
    assert any("Hits are not in KV events" in caption.value for caption in app.caption)


def test_page_says_why_there_is_no_lens(runs, monkeypatch):
    app = opened(runs, "memory", "chat", monkeypatch)
    assert not app.exception and any("tells nothing of its cache" in caption.value for caption in app.caption)
    assert "recorded no request" not in messages(app)


def test_the_figure_has_every_size_of_the_lens_and_its_intervals(cached):
    run = load(cached / "records")
    lens = kv_lens.lens_of(run).lens
    curve, actual, floor = miss_ratios(run.requests, lens)
    assert curve.pool.tolist() == [point.ratio for point in lens.curve if point.ratio is not None]
    assert (curve.low <= curve.miss).all() and (curve.miss <= curve.high).all()
    assert (actual, floor) == (1 - lens.hit_rate, 1 - lens.infinite_hit_rate)
    plain = miss_ratios(run.requests)[0]
    at_ratios = curve.set_index("pool").miss[plain.pool]
    assert at_ratios.tolist() == pytest.approx(plain.miss.tolist()), "one curve, not two"
    figure = memory.miss_ratio_curve(curve, actual, floor)
    assert {trace.name for trace in figure.data} >= {"95% interval", "measured", "no eviction at all"}


def test_many_requests_are_left_to_the_command_line(cached, monkeypatch):
    monkeypatch.setattr(kv_lens, "MOST_REQUESTS", 10)
    many = replace(load(cached / "records"), sent=11)
    assert "sojourn kv-lens records" in kv_lens.lens_of(many).why
