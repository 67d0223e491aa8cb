"""Every panel of the generated dashboards, and of vLLM's, draws from a real server under load."""

import json
import threading
from random import Random
from urllib.parse import urlsplit

import httpx
import pytest

from sojourn.dashboards.build import contents
from tests.dashboards.lint import expressions
from tests.dashboards.prometheus_server import as_grafana_asks, ask, draws, figures, scraping
from tests.engine.server_process import serving, wait_for
from tests.metrics.vllm_families import DASHBOARDS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.prometheus,
]

# What a machine without a GPU, without power sensors, or that was never calibrated cannot draw.
NEEDS_SENSORS = (
    "Power", "Energy per step", "GPU clocks", "GPU clock throttled, by reason", "GPU temperature", "GPU utilisation",
    "Memory of the GPU in use",
)  # fmt: skip
# ... and what this server does not use: speculation, mixtures, moderation, KV tiers, limits, groups, weight formats.
NEEDS_FEATURES = (
    "draft", "_expert_", "_moderation_", "_tier_", "_weight_", "_limited_", "_rank_seconds",
)  # fmt: skip
NEEDS_CALIBRATION = ("sojourn_compute_ceiling_", "sojourn_compute_roofline_")
CLIENTS = 12
PANELS = {
    (title, expr)
    for name, text in contents().items()
    if name.endswith(".json")
    for title, expr in expressions(json.loads(text))
}


class Load:
    """Clients of a pool that is too small for them: shared prefixes, preemptions, evictions, aborts, refusals."""

    def __init__(self, url: str):
        self._url = f"{url}/v1/completions"
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._client, args=(Random(index),)) for index in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _client(self, rng: Random) -> None:
        with httpx.Client(timeout=60) as client:
            while not self._over.is_set():
                shared = [100 + rng.randrange(8)] * 64  # one of a few prefixes
                body = {
                    "model": "tiny-model", "prompt": shared + rng.choices(range(200, 900), k=40),
                    "max_tokens": rng.randint(20, 120), "ignore_eos": True, "stream": True,
                }  # fmt: skip
                with client.stream("POST", self._url, json=body) as answer:
                    for _, _line in zip(range(rng.choice([5, 10_000])), answer.iter_lines(), strict=False):
                        pass

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("live")
    pool = ("--num-kv-blocks", "48", "--max-num-seqs", "8", "--max-waiting", "3", "--max-model-len", "512")
    objectives = ("--objective-ttft-ms", "200", "--objective-tpot-ms", "20", "--objective-e2e-ms", "5000")
    with serving(folder, "tiny-model", *pool, *objectives, "--compat", "vllm") as server:
        load = Load(server.url)
        try:
            with scraping(folder, urlsplit(server.url).netloc, scrapes=10) as base:
                yield base
        finally:
            load.stop()


def test_every_panel_draws_under_load(prometheus):
    empty: dict[str, list[str]] = {}

    def all_draw() -> bool:
        empty.clear()
        for title, expr in PANELS:
            if title in NEEDS_SENSORS or any(name in expr for name in NEEDS_CALIBRATION + NEEDS_FEATURES):
                continue
            if not draws(figures(prometheus, as_grafana_asks(expr, "1m"))):
                empty.setdefault(title, []).append(expr)
        return not empty

    try:
        wait_for(all_draw, timeout_s=60)
    except AssertionError:
        pytest.fail(f"empty: {json.dumps(empty, indent=1)}")


def test_panels_without_sensors_are_named_and_no_others_are_skipped():
    assert set(NEEDS_SENSORS) <= {title for title, _ in PANELS}
    skipped = {title for title, expr in PANELS if any(name in expr for name in NEEDS_CALIBRATION)}
    assert skipped == {
        "Compute throughput while busy, by composition",
        "Memory bandwidth while busy, by composition",
        "Roofline utilisation, by composition",
    }


@pytest.mark.parametrize(("name", "kind"), DASHBOARDS.items())
def test_vllm_s_dashboards_fill_under_load(prometheus, name, kind):
    if kind == "histogram":
        expr = f"histogram_quantile(0.99, sum by (le) (rate(vllm:{name}_bucket[1m])))"
    else:
        expr = f"sum(rate(vllm:{name}_total[1m]))" if kind == "counter" else f"max_over_time(vllm:{name}[1m])"
    assert wait_for(lambda: (found := figures(prometheus, expr)) and draws(found) and max(found) > 0, timeout_s=60)


def test_endpoint_picker_finds_the_pool(prometheus):
    (info,) = ask(prometheus, "vllm:cache_config_info")
    assert info["metric"]["num_gpu_blocks"] == "48" and info["metric"]["block_size"] == "16"
