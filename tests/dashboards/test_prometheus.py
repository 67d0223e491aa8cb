"""A real Prometheus scrapes a real page, and every panel draws a finite figure from it."""

import contextlib
import http.server
import json
import math
import re
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from random import Random

import pytest

from sojourn.dashboards.build import contents
from sojourn.dashboards.events import EVENTS
from sojourn.dashboards.neutral import BOUND
from sojourn.dashboards.rules import rules
from sojourn.dashboards.rules_of_ours import BUDGET
from sojourn.interop.exported.prometheus import Exporter
from sojourn.interop.exported.prometheus_series import CONTENT_TYPE, Histogram
from sojourn.interop.exported.vllm_names import EngineFacts
from sojourn.live.watch.document import Watch
from sojourn.live.watch.exposition import page as watch_page
from sojourn.metrics.catalog.metric import LAG_BOUNDS
from sojourn.metrics.compute.kernels import CLASSES
from sojourn.metrics.compute.startup import StartupClock
from sojourn.metrics.compute.weight_error import WeightError
from sojourn.metrics.memory.plan import MemoryPlan
from sojourn.metrics.steps import Steps
from tests.dashboards.lint import expressions
from tests.dashboards.prometheus_server import as_grafana_asks, ask, draws, figures, scraping
from tests.metrics.foreign import SglangPage, VllmPage, steady
from tests.metrics.live_pages import observed
from tests.metrics.random_records import random_request, random_step, random_system
from tests.metrics.vllm_families import DASHBOARDS

pytestmark = [
    pytest.mark.prometheus,
]

SCRAPES_NEEDED = 4
PLAN = MemoryPlan(
    free_bytes=9000, process_bytes=900, weight_bytes=800, kv_bytes=700, work_bytes=60, table_bytes=50, graph_bytes=40,
    num_kv_blocks=7, kv_tokens=112,
)  # fmt: skip
OBJECTIVES = [
    {"klass": "all", "ttft_ms": 150.0, "e2e_ms": 9000.0, "source": "test"},
    {"klass": "chat", "tpot_ms": 30.0},
]


class GrowingPage:
    """A server of random life: each scrape finds some more steps and requests. Remembers how often it was asked."""

    def __init__(self):
        self.exporter = Exporter("tiny", OBJECTIVES, compat="vllm")
        self.exporter.observe_ready(EngineFacts(300, 16, 8192, 64, "float32", prefix_caching=True))
        self.exporter.gauges.observe_plan(PLAN)
        self.exporter.gauges.observe_weight_error(WeightError("self", 1023, 0.01, 0.02, 0.97))
        self.exporter.core.observe_startup(StartupClock().startup().until(1 << 62))
        self.scrapes = 0
        self._lag = Histogram([round(bound * 1e9) for bound in LAG_BOUNDS])
        self.exporter.observe_ceilings({"float32": 2e11}, 3e10, "float32")
        self._rng = Random(7)
        self.live()

    def live(self) -> None:
        for _ in range(20):
            self.exporter.observe_steps(Steps([random_step(self._rng, self.scrapes)]))
            self.exporter.observe_request(random_request(self._rng, self.scrapes))
        self.exporter.system.observe(random_system(self._rng, self.scrapes))
        self.exporter.system.observe_burst({klass: 1000 * (self.scrapes + 1) for klass in CLASSES})
        self._lag.observe(3_000_000)
        self.exporter.system.observe_loop_lag(self._lag.counts, self._lag.total)
        self.exporter.observe_rejection("queue_full")
        self.exporter.observe_limited("free", "concurrency")
        self.exporter.observe_moderation({("input", "abuse", "block"): self.scrapes}, {"endpoint": self.scrapes})
        self.exporter.observe_prices({("acme", "EUR", "tokens"): Decimal(self.scrapes)})
        self.exporter.observe_connections(3, {"idle": self.scrapes})
        self.exporter.core.observe_silence(0.5)
        self.exporter.core.observe_oldest_wait(0.25)
        self.exporter.observe_recorder(dropped=self.scrapes, failed=self.scrapes)
        self.exporter.observe_tracer({"head": self.scrapes}, {"exported": self.scrapes, "dropped": self.scrapes})

    def scrape(self) -> bytes:
        self.live()
        self.scrapes += 1
        if self.scrapes == 2:
            self.exporter.observe_core_restart()
        return self.exporter.render()


class WatchPage:
    """A `sojourn watch` of a server whose batch is too small."""

    def __init__(self):
        server = observed(steady(100, every_s=0.4, queue_s=2.0), 40, lambda _: (4, 6, 0.2)).watched()
        self._watch = Watch(at="", state=server.state, headline="", servers=[server])

    def scrape(self) -> bytes:
        return watch_page(self._watch)


class ForeignPage:
    """A vLLM or SGLang with some more requests at each scrape."""

    def __init__(self, page: VllmPage | SglangPage):
        self._page = page

    def scrape(self) -> bytes:
        life = replace(steady(1)[0], queue_s=0.2, cached_tokens=30, preemptions=1)
        self._page.prefilled(life)
        self._page.finished(life)
        self._page.show(running=2, waiting=1, kv_use=0.5, engine=0)
        return self._page.render()


@contextlib.contextmanager
def served(page: GrowingPage | ForeignPage | WatchPage) -> Iterator[str]:
    """The host and port of a server of this page."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = page.scrape()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory):
    """(base URL, page) of a Prometheus of our own that has scraped the pages of three engines a few times."""
    page = GrowingPage()
    with (
        served(page) as ours, served(ForeignPage(VllmPage())) as vllm, served(ForeignPage(SglangPage())) as sglang,
        served(WatchPage()) as watch,
        scraping(tmp_path_factory.mktemp("prometheus"), ours, vllm, sglang, watch, scrapes=SCRAPES_NEEDED) as base,
    ):  # fmt: skip
        yield base, page


PANELS = [
    pytest.param(expr, id=f"{name.removesuffix('.json')}: {title}")
    for name, text in contents().items()
    if name.endswith(".json")
    for title, expr in expressions(json.loads(text))
]


@pytest.mark.parametrize("expr", PANELS)
def test_panel_draws_finite_figures(prometheus, expr):
    base, _ = prometheus
    numbers = figures(base, as_grafana_asks(expr))
    assert draws([abs(number) for number in numbers] if expr.startswith("1 - ") else numbers), numbers  # spent budget


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.name)
def test_every_annotation_is_a_query_and_those_of_this_page_have_samples(prometheus, event):
    base, _ = prometheus
    found = figures(base, as_grafana_asks(event.expr))
    assert found or event.name == "Restarts"  # no page begins again here


NEUTRAL = [
    pytest.param(name, expr, id=f"{name}: {title}")
    for name in ("saturation", "drilldown")
    for title, expr in expressions(json.loads(contents()[f"sojourn-{name}.json"]))
]
# Figures that only some engines tell (or the page of this test), by a word of their expression.
ONLY_SOME = {
    "sojourn_": {"sojourn"}, BOUND.removeprefix("sojourn_"): {"sojourn"}, "drafted": {"sojourn"},
    "compute_device_seconds": {"sojourn", "sglang"}, "rejected": {"sojourn"},
    "length_tokens": {"sojourn", "vllm"},
    'outcome=~"error|abort"': {"sojourn", "vllm"},
}  # fmt: skip


@pytest.mark.parametrize(("name", "expr"), NEUTRAL)
def test_panel_of_the_two_tiers_fills_from_every_engine_that_tells_its_figure(prometheus, name, expr):
    base, _ = prometheus
    engines = next((some for word, some in ONLY_SOME.items() if word in expr), {"sojourn", "vllm", "sglang"})
    for engine in engines:
        of_one = as_grafana_asks(expr)
        for selector in set(re.findall(r"llm:\w+\{", of_one)):
            of_one = of_one.replace(selector, f'{selector}engine="{engine}",')
        assert figures(base, of_one), (engine, of_one)


def vllm_expression(name: str, kind: str) -> str:
    """As vLLM's dashboards ask for a family."""
    if kind == "histogram":
        return f'histogram_quantile(0.99, sum by (le) (rate(vllm:{name}_bucket{{model_name="tiny"}}[10s])))'
    return f"rate(vllm:{name}_total[10s])" if kind == "counter" else f'vllm:{name}{{model_name="tiny"}}'


@pytest.mark.parametrize(("name", "kind"), DASHBOARDS.items())
def test_panel_of_vllm_s_dashboards_fills(prometheus, name, kind):
    base, _ = prometheus
    numbers = figures(base, vllm_expression(name, kind))
    assert numbers and all(math.isfinite(number) for number in numbers)
    assert sum(numbers) > 0


def test_dashboards_of_vllm_find_the_model(prometheus):
    base, _ = prometheus
    with urllib.request.urlopen(f"{base}/api/v1/label/model_name/values") as answer:
        assert "tiny" in json.load(answer)["data"]
    (info,) = ask(base, 'vllm:cache_config_info{num_gpu_blocks="300"}')
    assert info["metric"]["num_gpu_blocks"] == "300" and info["value"][1] == "1"


def test_scraped_counter_is_the_exporter_s(prometheus):
    base, _ = prometheus
    # Each life brings 20 steps, and a scrape tells how many went before it; one query sees one moment.
    found = ask(base, "sum(sojourn_compute_steps_total) - 20 * max(sojourn_telemetry_dropped_records_total)")
    assert float(found[0]["value"][1]) == 40


@pytest.mark.parametrize("rule", [rule["record"] for rule in rules()["groups"][1]["rules"]])
def test_recording_rule_gives_a_figure(prometheus, rule):
    base, _ = prometheus
    give_up = time.monotonic() + 10
    while not (found := ask(base, rule)):  # the rules are evaluated once a second
        assert time.monotonic() < give_up, f"{rule} records nothing"
        time.sleep(0.2)
    assert math.isfinite(float(found[0]["value"][1]))
    assert found[0]["metric"].get("model_name", "tiny" if rule == BUDGET else "") == "tiny"
