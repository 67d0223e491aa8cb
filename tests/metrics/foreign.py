"""Foreign servers with a known truth: requests whose every part is planned, and /metrics pages as their servers write.

The pages are rendered by prometheus_client, which both servers use, from families with the names, types and labels of
vLLM 0.32.0 (v1/metrics/loggers.py, buckets.py) and SGLang 0.5.23 (observability/metrics_collector.py and
managers/tokenizer_manager.py of its wheel on PyPI). Of their bucket bounds only some are kept: parsing takes time.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from sojourn.loadgen.target.scrape import rows_of
from sojourn.metrics.records import ClientRecord
from sojourn.metrics.records.tables import row
from sojourn.metrics.run.directory import REQUIRED, RunDirectory
from sojourn.metrics.run.segments import write_segment

S, MS = 1_000_000_000, 1_000_000
START_NS = 1_000 * S
OBJECTIVES = [{"klass": "all", "ttft_ms": 400.0, "tpot_ms": 40.0, "source": "chosen for the tests"}]
LATENCY_BOUNDS = (0.3, 1.0, 5.0)
TTFT_BOUNDS = (0.1, 0.25, 0.5, 1.0, 5.0)
ITL_BOUNDS = (0.01, 0.025, 0.1)
TOKEN_BOUNDS = (10, 100, 1000)


@dataclass(frozen=True, slots=True)
class Life:
    """One request and where its time goes, in seconds, in the order in which it meets them."""

    due_s: float
    lag_s: float = 0.001
    way_in_s: float = 0.002  # network and parsing, before the server's own arrival
    encode_s: float = 0.003  # arrival → the core's waiting line
    queue_s: float = 0.0
    prefill_s: float = 0.05
    decode_s: float = 0.4
    back_s: float = 0.001  # core → front, after the first and after the last token
    way_out_s: float = 0.004  # text, socket and network
    prompt_tokens: int = 100
    cached_tokens: int = 0
    output_tokens: int = 21
    preemptions: int = 0
    reason: str = "length"
    engine: int = 0
    buffered: bool = False  # a proxy gives its text away at the end
    cut_s: float = 1e9  # age at which a proxy ends its stream

    @property
    def arrived_s(self) -> float:
        return self.due_s + self.lag_s + self.way_in_s

    @property
    def queued_s(self) -> float:
        return self.arrived_s + self.encode_s

    @property
    def scheduled_s(self) -> float:
        return self.queued_s + self.queue_s

    @property
    def first_s(self) -> float:
        return self.scheduled_s + self.prefill_s

    @property
    def last_s(self) -> float:
        return self.first_s + self.decode_s

    @property
    def read_first_s(self) -> float:
        return self.first_s + self.back_s + self.way_out_s

    @property
    def read_last_s(self) -> float:
        return self.last_s + self.back_s + self.way_out_s


class Page(Protocol):
    """A server's /metrics."""

    def prefilled(self, life: Life) -> None: ...
    def finished(self, life: Life) -> None: ...
    def show(self, running: int, waiting: int, kv_use: float, engine: int) -> None: ...
    def render(self) -> bytes: ...


class VllmPage:
    """vLLM's page, of one or several engines."""

    def __init__(self, engines: int = 1, block_size: int = 16, prefix_caching: bool = True,
                 ttft_bounds=TTFT_BOUNDS, itl_bounds=ITL_BOUNDS, drafts: bool = False, cpu: bool = False,
                 adapters: bool = False):  # fmt: skip
        self.registry = CollectorRegistry()
        self.labels = ("model_name", "engine")
        gauges = {
            "running": "vllm:num_requests_running", "waiting": "vllm:num_requests_waiting",
            "kv": "vllm:kv_cache_usage_perc",
        }  # fmt: skip
        counters = {
            "prompt": "vllm:prompt_tokens", "generated": "vllm:generation_tokens", "preempted": "vllm:num_preemptions",
            "queries": "vllm:prefix_cache_queries", "hits": "vllm:prefix_cache_hits",
            "external_queries": "vllm:external_prefix_cache_queries",
            "external_hits": "vllm:external_prefix_cache_hits",
        }  # fmt: skip
        if drafts:
            counters |= {
                "rounds": "vllm:spec_decode_num_drafts", "drafted": "vllm:spec_decode_num_draft_tokens",
                "accepted": "vllm:spec_decode_num_accepted_tokens",
            }  # fmt: skip
        histograms = {
            "ttft": ("vllm:time_to_first_token_seconds", ttft_bounds),
            "itl": ("vllm:inter_token_latency_seconds", itl_bounds),
            "tpot": ("vllm:request_time_per_output_token_seconds", itl_bounds),
            "e2e": ("vllm:e2e_request_latency_seconds", LATENCY_BOUNDS),
            "queue": ("vllm:request_queue_time_seconds", LATENCY_BOUNDS),
            "prefill": ("vllm:request_prefill_time_seconds", LATENCY_BOUNDS),
            "decode": ("vllm:request_decode_time_seconds", LATENCY_BOUNDS),
            "prompts": ("vllm:request_prompt_tokens", TOKEN_BOUNDS),
            "outputs": ("vllm:request_generation_tokens", TOKEN_BOUNDS),
            "step": ("vllm:iteration_tokens_total", TOKEN_BOUNDS),
        }
        made = {key: Gauge(name, name, self.labels, registry=self.registry) for key, name in gauges.items()}
        made |= {key: Counter(name, name, self.labels, registry=self.registry) for key, name in counters.items()}
        made |= {
            key: Histogram(name, name, self.labels, buckets=bounds, registry=self.registry)
            for key, (name, bounds) in histograms.items()
        }
        info = Gauge("vllm:cache_config_info", "x", ("block_size", "num_gpu_blocks", "enable_prefix_caching", "engine"),
                     registry=self.registry)  # fmt: skip
        for engine in range(engines):
            info.labels(str(block_size), "4096", str(prefix_caching), str(engine)).set(1)
        names = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
        self.adapters = Gauge("vllm:lora_requests_info", "x", names, registry=self.registry) if adapters else None
        self.cpu = Gauge("process_cpu_seconds_total", "x", registry=self.registry) if cpu else None  # of the front
        success = Counter("vllm:request_success", "x", (*self.labels, "finished_reason"), registry=self.registry)
        self.of = [{key: family.labels("m", str(engine)) for key, family in made.items()} for engine in range(engines)]
        self.success = [
            {reason: success.labels("m", str(engine), reason)
             for reason in ("stop", "length", "abort", "error", "repetition")}
            for engine in range(engines)
        ]  # fmt: skip

    def prefilled(self, life: Life) -> None:
        own = self.of[life.engine]
        own["prompt"].inc(life.prompt_tokens)
        own["queries"].inc(life.prompt_tokens)
        own["hits"].inc(life.cached_tokens)
        own["generated"].inc(1)
        own["ttft"].observe(life.first_s + life.back_s - life.arrived_s)
        own["step"].observe(life.prompt_tokens - life.cached_tokens + 1)

    def finished(self, life: Life) -> None:
        own, gaps = self.of[life.engine], life.output_tokens - 1
        own["generated"].inc(gaps)
        own["preempted"].inc(life.preemptions)
        for _ in range(gaps):
            own["itl"].observe(life.decode_s / gaps)
        own["tpot"].observe(life.decode_s / gaps if gaps else 0)
        own["queue"].observe(life.queue_s)
        own["prefill"].observe(life.prefill_s)
        own["decode"].observe(life.decode_s)
        own["e2e"].observe(life.last_s + life.back_s - life.arrived_s)
        own["prompts"].observe(life.prompt_tokens)
        own["outputs"].observe(life.output_tokens)
        self.success[life.engine][life.reason].inc()

    def show(self, running: int, waiting: int, kv_use: float, engine: int) -> None:
        self.of[engine]["running"].set(running)
        self.of[engine]["waiting"].set(waiting)
        self.of[engine]["kv"].set(kv_use)

    def render(self) -> bytes:
        return generate_latest(self.registry)


class SglangPage:
    """SGLang's page: one tokenizer process, and a scheduler for each of `ranks` (dp_rank, tp_rank)."""

    def __init__(self, ranks: Iterable[tuple[int, int]] = ((0, 0),), priorities: bool = False):
        self.registry = CollectorRegistry()
        self.ranks, self.priorities = list(ranks), priorities
        own = ("model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank", "dp_rank")
        own += ("priority",) if priorities else ()
        registry = self.registry
        self.gauges = {
            key: Gauge(name, name, own, registry=registry)
            for key, name in (
                ("running", "sglang:num_running_reqs"), ("waiting", "sglang:num_queue_reqs"),
                ("grammar", "sglang:num_grammar_queue_reqs"), ("usage", "sglang:token_usage"),
            )
        }  # fmt: skip
        self.queue = Histogram("sglang:queue_time_seconds", "x", own, buckets=LATENCY_BOUNDS, registry=registry)
        self.stage = Histogram("sglang:per_stage_req_latency_seconds", "x", (*own, "stage"), buckets=LATENCY_BOUNDS,
                               registry=registry)  # fmt: skip
        self.effective = Counter("sglang:prefill_effective_tokens_total", "x", (*own, "mode"), registry=registry)
        self.retracted = Counter("sglang:num_retracted_requests_total", "x", own, registry=registry)
        self.forward = Counter("sglang:forward_execution_seconds_total", "x", (*own, "category"), registry=registry)
        self.realtime = Counter("sglang:realtime_tokens_total", "x", (*own, "mode"), registry=registry)
        for labels in map(self._labels, self.ranks):
            for mode in ("input", "device_hit", "host_hit", "storage_hit"):
                self.effective.labels(**labels, mode=mode)
        streamed = ("model_name", "engine_type", "is_streaming")
        self.tokens = {
            key: Counter(name, name, streamed, registry=registry)
            for key, name in (
                ("prompt", "sglang:prompt_tokens_total"), ("generated", "sglang:generation_tokens_total"),
                ("requests", "sglang:num_requests_total"),
            )
        }  # fmt: skip
        self.ttft = Histogram(
            "sglang:time_to_first_token_seconds", "x", streamed, buckets=TTFT_BOUNDS, registry=registry
        )
        self.e2e = Histogram("sglang:e2e_request_latency_seconds", "x", streamed, buckets=LATENCY_BOUNDS,
                             registry=registry)  # fmt: skip
        self.tpot = Histogram("sglang:request_time_per_output_token_seconds", "x", streamed, buckets=ITL_BOUNDS,
                              registry=registry)  # fmt: skip
        self.itl = Histogram("sglang:inter_token_latency_seconds", "x", ("model_name", "engine_type"),
                             buckets=ITL_BOUNDS, registry=registry)  # fmt: skip

    def prefilled(self, life: Life) -> None:
        for labels in self._of(life.engine):
            self.queue.labels(**labels).observe(life.queue_s)
            self.stage.labels(**labels, stage="request_process").observe(life.encode_s / 3)
            self.stage.labels(**labels, stage="prefill_forward").observe(life.prefill_s)
            self.stage.labels(**labels, stage="chunked_prefill").observe(life.prefill_s)
            self.effective.labels(**labels, mode="input").inc(life.prompt_tokens - life.cached_tokens)
            self.effective.labels(**labels, mode="device_hit").inc(life.cached_tokens)
            self.realtime.labels(**labels, mode="prefill_compute").inc(life.prompt_tokens - life.cached_tokens)
            self.forward.labels(**labels, category="EXTEND").inc(life.prefill_s)
        self.ttft.labels("m", "unified", "true").observe(life.first_s + life.back_s - life.arrived_s)

    def finished(self, life: Life) -> None:
        for labels in self._of(life.engine):
            if life.preemptions:
                self.retracted.labels(**labels).inc(life.preemptions)
            self.forward.labels(**labels, category="DECODE").inc(life.decode_s / 8)
        self.tokens["prompt"].labels("m", "unified", "true").inc(life.prompt_tokens)
        self.tokens["generated"].labels("m", "unified", "true").inc(life.output_tokens)
        self.tokens["requests"].labels("m", "unified", "true").inc()
        self.e2e.labels("m", "unified", "true").observe(life.last_s + life.back_s - life.arrived_s)
        self.tpot.labels("m", "unified", "true").observe(life.decode_s / (life.output_tokens - 1))
        for _ in range(life.output_tokens - 1):
            self.itl.labels("m", "unified").observe(life.decode_s / (life.output_tokens - 1))

    def show(self, running: int, waiting: int, kv_use: float, engine: int) -> None:
        for labels in self._of(engine):
            for key, value in (("running", running), ("waiting", waiting), ("grammar", 0), ("usage", kv_use)):
                self.gauges[key].labels(**labels).set(value)
                if self.priorities and key in ("running", "waiting"):
                    self.gauges[key].labels(**labels | {"priority": "7"}).set(value)

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def _of(self, engine: int) -> list[dict[str, object]]:
        return [self._labels(rank) for rank in self.ranks if rank[0] == engine]

    def _labels(self, rank: tuple[int, int]) -> dict[str, object]:
        labels = {"model_name": "m", "engine_type": "unified", "tp_rank": rank[1], "pp_rank": 0, "moe_ep_rank": 0,
                  "dp_rank": rank[0]}  # fmt: skip
        return labels | ({"priority": ""} if self.priorities else {})


def foreign_run(
    path: Path, lives: list[Life], page: Page, *, kv_use: float = 0.3, restart_at_s: float | None = None,
    fresh: Page | None = None, silent: tuple[float, float] = (0.0, 0.0), engines: int = 1,
    scenario: dict | None = None, objectives: list[dict] | None = None,
) -> RunDirectory:  # fmt: skip
    """A run directory as `sojourn load` leaves it: the client's records, and a scrape a second.

    With `restart_at_s` the server's counters begin anew, in `fresh`; scrapes in the span `silent` failed.
    """
    classes = {"klass": "chat", "prompt_tokens": 100, "output_tokens": 21}
    meta = dict.fromkeys(REQUIRED) | {
        "scenario": {"name": "foreign", "workload": {"classes": [classes]}} | (scenario or {}),
        "seed": 0,
        "command": ["sojourn", "load", "foreign", "--base-url", "http://127.0.0.1:9", "--seed", "0"],
        "engine": {"base_url": "http://127.0.0.1:9", "model": "m"},
        "objectives": OBJECTIVES if objectives is None else objectives,
        "valid": True,
        "failed_scrapes": 0,
    }
    run = RunDirectory.create(path, meta)
    records = [_client(number, life) for number, life in enumerate(lives)]
    write_segment(run.path, "client", [row(record) for record in records], "0")
    end_s = max((life.read_last_s for life in lives), default=0.0)
    rows = []
    before = float("-inf")
    for second in [-1.0, *range(0, int(end_s) + 1), end_s + 0.5]:
        if restart_at_s is not None and before < restart_at_s <= second:
            finish(page, lives, before, restart_at_s)
            page, before = fresh, restart_at_s
        finish(page, lives, before, second)
        for engine in range(engines):
            own = [life for life in lives if life.engine == engine]
            waiting = sum(life.queued_s <= second < life.scheduled_s for life in own)
            running = sum(life.scheduled_s <= second < life.last_s for life in own)
            page.show(running, waiting, kv_use if running else 0.0, engine)
        before, ns = second, START_NS + int(second * S)
        if silent[0] <= second < silent[1]:
            rows.append({"ns": ns, "name": "up", "labels": [], "value": 0.0})
        else:
            rows += rows_of(page.render(), ns, took_s=0.004)
    write_segment(run.path, "scrapes", rows, "0")
    run.compact()
    return run


def steady(count: int = 60, every_s: float = 0.25, **parts) -> list[Life]:
    """Requests alike, at a constant rate."""
    return [replace(Life(due_s=number * every_s), **parts) for number in range(count)]


def finish(page: Page, lives: list[Life], since_s: float, until_s: float) -> None:
    """Observes what the requests did between two moments."""
    for life in lives:
        if since_s < life.first_s <= until_s:
            page.prefilled(life)
        if since_s < life.last_s <= until_s:
            page.finished(life)


def _client(number: int, life: Life) -> ClientRecord:
    first, last = life.read_first_s, life.read_last_s
    if life.buffered:
        first = last - 0.001
    stamps = [_ns(first + (last - first) * at / (life.output_tokens - 1)) for at in range(life.output_tokens)]
    read = [ns for ns in stamps if ns <= _ns(life.due_s + life.lag_s + life.cut_s)]
    is_cut = len(read) < len(stamps)
    return ClientRecord(
        request_id=f"r{number:05d}", scenario="foreign", due_ns=_ns(life.due_s),
        status="error" if is_cut else "ok", klass="chat",
        sent_ns=_ns(life.due_s + life.lag_s), first_token_ns=read[0], last_byte_ns=read[-1],
        error="the stream ended before its last event" if is_cut else None,
        prompt_tokens=life.prompt_tokens, output_tokens=life.output_tokens, chunk_ns=read,
        chunk_tokens=[1] * len(read),
    )  # fmt: skip


def _ns(seconds: float) -> int:
    return START_NS + round(seconds * S)
