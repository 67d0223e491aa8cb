"""The page Size answers without a run, and follows its sliders."""

import sys

import pytest

from sojourn.ui.figures.size import latency_by_rate, memory
from tests.ui.test_app import html, messages, opened


@pytest.fixture
def size_page(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["app.py", "--runs", str(tmp_path)])
    monkeypatch.setattr("sojourn.replay.device.makers.measured_kernels", _without_tables)
    monkeypatch.setattr("sojourn.replay.sizing.limit.FEWEST", 40)  # requests: short trials
    monkeypatch.setattr("sojourn.replay.sizing.limit.MOST_TOKENS", 10_000)
    monkeypatch.setattr("sojourn.replay.sizing.fleet.REQUESTS_A_REPLICA", 20)
    return opened(tmp_path, "size", None, monkeypatch)


def _without_tables(*_):
    from sojourn.metrics.installed import PackageMissing

    raise PackageMissing("the extra is not installed")


def test_the_page_sizes_a_model_and_follows_a_slider(size_page):
    app = size_page
    assert not app.exception and not app.error, app.exception
    shown = html(app)
    assert "4 × h100_sxm" in shown and "KV of a token" not in shown.split("largest req/s")[0]
    assert "80 layers × 2 × 2 KV heads × 128 × 2 bytes" in shown and "peak rates" in messages(app)
    assert len(app.get("plotly_chart")) == 4 and app.get("download_button")
    app.selectbox(key="size-weights").select("bf16")
    app = app.select_slider(key="size-tp").set_value(1).run()
    assert not app.exception
    assert "refused" in html(app) and "leaves no memory" in messages(app)


def test_figures_of_nothing_say_so():
    assert memory([]).layout.annotations and latency_by_rate([], "tpot_ms", "p90", 40.0).layout.annotations
