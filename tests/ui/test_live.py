"""The page Live: the figures of a watch, sentences for wrong addresses, and no address of a link is read unasked."""

import importlib.util
import sys
import time

import pytest
from streamlit.testing.v1 import AppTest

from sojourn.live.watch.document import Part
from sojourn.live.watch.watcher import Watcher
from sojourn.ui.figures import live as figures
from sojourn.ui.markup import live as markup
from tests.metrics.foreign import steady
from tests.metrics.live_pages import observed, page, pages, serving

APP = importlib.util.find_spec("sojourn.ui.app").origin


@pytest.fixture
def live(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["app.py", "--runs", str(tmp_path)])

    def opened(**query: str) -> AppTest:
        app = AppTest.from_file(APP, default_timeout=60)
        app.query_params.update(query)
        return app.run().switch_page("views/live.py").run()

    return opened


def html(app: AppTest) -> str:
    return "".join(element.proto.body for element in app.get("html"))


def test_page_without_a_server_asks_for_one(live):
    app = live()
    assert not app.exception and "Enter a server address" in app.info[0].value


def test_page_watches_the_server_of_the_address(live):
    with serving(pages(page())) as url:
        app = live(url=url)
        deadline = time.monotonic() + 10
        while 'sj-name">output' not in html(app):
            assert time.monotonic() < deadline and not app.exception
            time.sleep(0.5)
            app = app.run()
        assert "Looking" in html(app)  # the verdict takes ten seconds
        assert "vLLM at" in app.caption[0].value and len(app.get("plotly_chart")) == 3
        profile = next(button for button in app.button if button.label.startswith("Profile"))
        assert profile.disabled and "vLLM and SGLang have no such call" in profile.help


def test_page_that_slept_for_too_long_begins_a_new_watch(live, monkeypatch):
    begun, start = [], Watcher.start

    def over_at_first(watcher):
        begun.append(start(watcher))
        if len(begun) == 1:
            watcher.stop()
        return watcher

    monkeypatch.setattr(Watcher, "start", over_at_first)
    with serving(pages(page())) as url:
        app = live(url=url)
        begun[-1].stop()
    assert not app.exception and len(begun) == 2


def test_wrong_addresses_and_objectives_are_told(live):
    assert "no http address" in live(url="ftp://127.0.0.1").error[0].value
    assert "names no latency" in live(url="http://127.0.0.1:9", slo="fast:1").error[0].value


def test_a_link_to_another_host_is_not_read_unasked(live):
    app = live(url="http://192.0.2.1:8000")
    assert "not of this host" in app.info[-1].value and not app.get("plotly_chart")


def test_percentiles_and_goodput_are_drawn_between_their_bounds():
    observer = observed(steady(200, every_s=0.4), 60, lambda _: (4, 1, 0.2), {"ttft_ms": 500, "tpot_ms": 100})
    points = list(observer.latencies)
    fig = figures.percentiles(points)
    panels = [fig.layout[f"yaxis{row}"].title.text for row in ("", 2, 3, 4)]
    assert panels == ["TTFT (ms)", "TPOT (ms)", "ITL (ms)", "queue (ms)"] and len(fig.data) == 16
    low, high = fig.data[0], fig.data[1]
    assert high.fill == "tonexty" and all(a < b for a, b in zip(low.y, high.y, strict=True))
    goodput = figures.goodput(points)
    assert all(a <= b for a, b in zip(goodput.data[0].y, goodput.data[1].y, strict=True))
    assert figures.goodput([]) is None and figures.between(750, None) == "above 750 ms"
    shown = markup.percentiles(observer.watched())
    assert "TTFT" in shown and " to " in shown and "goodput" in markup.tiles(observer.watched())


def test_text_of_a_server_is_escaped():
    server = observed(steady(100, every_s=0.4), 40, lambda _: (4, 0, 0.2)).watched()
    hostile = type(server)(
        **{name: getattr(server, name) for name in server.__struct_fields__} | {"headline": "<script>"}
    )
    assert "<script>" not in markup.headline(hostile)


def test_figures_show_the_history_and_the_parts():
    observer = observed(steady(100, every_s=0.4), 40, lambda _: (4, 1, 0.2))
    fig = figures.history(list(observer.history))
    assert [trace.name for trace in fig.data] == ["running", "waiting", "KV use", "prompt tokens", "output tokens"]
    assert fig.data[0].x[-1] == 0 and set(fig.data[2].y) == {20.0}
    whole = figures.parts([Part(name="queue", mean_ms=30, share=0.3), Part(name="rest", mean_ms=70, share=0.7)])
    assert sum(trace.x[0] for trace in whole.data) == pytest.approx(100)
