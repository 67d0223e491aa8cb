"""vLLM's names for our numbers, so that its dashboards, KEDA rules and the Gateway API endpoint picker work unchanged.

Names, types, labels, buckets and meanings are those of vLLM 0.33 (`vllm/v1/metrics`); the numbers are folded from the
same records as our own. Where the two cannot be the same, the help text says so:

- Time to first token and inter-token latency are booked when the request ends; vLLM books them as they happen.
- A token's moment is that in which it left the core; the front has it some 0.1 ms later.
- A call with several choices is one request here; vLLM counts each choice.
"""

import time
from collections.abc import Collection
from dataclasses import dataclass, replace

from sojourn.interop.exported.prometheus_pool import PoolGauges
from sojourn.interop.exported.prometheus_series import Series
from sojourn.interop.exported.prometheus_steps import ColumnSums, draft_positions
from sojourn.interop.exported.request_outcome import SERVED, gaps_ns, outcome
from sojourn.metrics.catalog.metric import Kind, Metric
from sojourn.metrics.records import MOST_DRAFTS, RequestRecord
from sojourn.metrics.steps import Steps

_LATENCY = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
_TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
_ITL = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
_RESIDENCY = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800,
)  # fmt: skip
FINISHED_REASONS = ("stop", "length", "abort", "error", "repetition")
SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What vLLM's names say of an engine beside its records. Known once it is ready."""

    num_kv_blocks: int
    block_size: int  # tokens
    max_model_len: int  # tokens
    kv_bytes_per_token: int
    cache_dtype: str
    prefix_caching: bool


def _length_bounds(longest: int) -> tuple[float, ...]:
    """1 2 5 10 20 50 … up to the longest sequence."""
    bounds = []
    for exponent in range(len(str(longest))):
        bounds += [base * 10**exponent for base in (1, 2, 5) if base * 10**exponent <= longest]
    return tuple(bounds)


def _metric(
    kind: Kind,
    name: str,
    unit: str,
    meaning: str,
    buckets: tuple[float, ...] = (),
    cannot: str = "",
    **labels: tuple[str, ...],
) -> Metric:
    values = tuple((value,) for value in next(iter(labels.values()))) if labels else ((),)
    return Metric(
        f"vllm:{name}", kind, unit, "request", meaning, cannot, labels=tuple(labels), values=values, buckets=buckets
    )


def vllm_metrics(facts: EngineFacts) -> tuple[Metric, ...]:
    """The families, without `cache_config_info`, whose labels are its content."""
    lengths = _length_bounds(facts.max_model_len)
    at_end = "Booked when the request ends."
    return (
        _metric("gauge", "num_requests_running", "requests", "Requests in the batch of the last step."),
        _metric("gauge", "num_requests_waiting", "requests", "Requests that wait for a batch slot."),
        _metric("gauge", "kv_cache_usage_perc", "ratio", "Share of KV blocks in use; 1 is all."),
        _metric("counter", "prompt_tokens_total", "tokens", "Prompt tokens, cached ones included.", (), at_end),
        _metric("counter", "prompt_tokens_by_source_total", "tokens", "Prompt tokens by where their KV came from.",
                (), at_end, source=SOURCES),
        _metric("counter", "generation_tokens_total", "tokens", "Tokens generated."),
        _metric("counter", "prefix_cache_queries_total", "tokens", "Prompt tokens asked of the prefix cache.", (),
                f"A preempted request does not ask again. {at_end}"),
        _metric("counter", "prefix_cache_hits_total", "tokens", "Prompt tokens that the prefix cache had.", (),
                f"A preempted request does not ask again. {at_end}"),
        _metric("counter", "spec_decode_num_drafts_total", "drafts", "Drafts of a request in one step, as one."),
        _metric("counter", "spec_decode_num_draft_tokens_total", "tokens", "Draft tokens that steps verified."),
        _metric("counter", "spec_decode_num_accepted_tokens_total", "tokens", "Draft tokens that were accepted."),
        _metric("counter", "spec_decode_num_accepted_tokens_per_pos_total", "tokens",
                "Accepted draft tokens by position.", position=tuple(map(str, range(MOST_DRAFTS)))),
        _metric("counter", "num_preemptions_total", "requests", "Preemptions."),
        _metric("counter", "request_success_total", "requests", "Requests that ended, by reason.", (),
                "Those whose client went away are not in it.", finished_reason=FINISHED_REASONS),
        _metric("histogram", "iteration_tokens_total", "tokens", "Tokens of one step.", _ITERATION,
                "A chunk of a prompt counts in the step that computed it."),
        _metric("histogram", "time_to_first_token_seconds", "seconds", "Arrival to first token.", _TTFT, at_end),
        _metric("histogram", "inter_token_latency_seconds", "seconds",
                "Between two steps that gave tokens of a request.", _ITL, at_end),
        _metric("histogram", "request_time_per_output_token_seconds", "seconds",
                "Mean gap after the first token; 0 for one token.", _ITL),
        _metric("histogram", "e2e_request_latency_seconds", "seconds", "Arrival to last token.", _LATENCY),
        _metric("histogram", "request_queue_time_seconds", "seconds", "Queued to first scheduled.", _LATENCY),
        _metric("histogram", "request_inference_time_seconds", "seconds", "First scheduled to last token.", _LATENCY),
        _metric("histogram", "request_prefill_time_seconds", "seconds", "First scheduled to first token.", _LATENCY),
        _metric("histogram", "request_decode_time_seconds", "seconds", "First token to last token.", _LATENCY),
        _metric("histogram", "request_num_preemptions", "requests", "Preemptions of a request.", _PREEMPTIONS),
        _metric("histogram", "request_prompt_tokens", "tokens", "Prompt tokens of a request.", lengths),
        _metric("histogram", "request_generation_tokens", "tokens", "Output tokens of a request.", lengths),
        _metric("histogram", "request_max_num_generation_tokens", "tokens",
                "Output tokens of the longest choice of a request.", lengths),
        _metric("histogram", "kv_block_lifetime_seconds", "seconds", "From allocation to eviction, sampled.",
                _RESIDENCY),
        _metric("histogram", "kv_block_idle_before_evict_seconds", "seconds", "Unread before eviction, sampled.",
                _RESIDENCY),
        _metric("histogram", "kv_block_reuse_gap_seconds", "seconds", "Between two uses of a block, sampled.",
                _RESIDENCY),
        _metric("counter", "estimated_flops_per_gpu_total", "flops", "Floating-point operations of steps."),
        _metric("counter", "estimated_read_bytes_per_gpu_total", "bytes", "Bytes that steps must read at least."),
        _metric("counter", "estimated_write_bytes_per_gpu_total", "bytes", "Bytes that steps must write at least.",
                (), "Keys and values only."),
    )  # fmt: skip


def _info(facts: EngineFacts) -> Metric:
    """`cache_config_info`: what it says stands in its labels, and its value is 1."""
    content = {
        "block_size": str(facts.block_size),
        "cache_dtype": facts.cache_dtype,
        "enable_prefix_caching": str(facts.prefix_caching),
        "num_gpu_blocks": str(facts.num_kv_blocks),
    }
    metric = _metric("gauge", "cache_config_info", "info", "The KV pool, in its labels; always 1.")
    return replace(metric, labels=tuple(content), values=(tuple(content.values()),))


_ADAPTER_LABELS = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
_ADAPTERS = replace(
    _metric("gauge", "lora_requests_info", "seconds", "LoRA adapters of open requests, in its labels; Unix time.", (),
            "Only with adapters. Names have commas between them."),
    labels=_ADAPTER_LABELS, values=(),
)  # fmt: skip


# Histograms of list fields of a step.
_SAMPLES = {
    "vllm:kv_block_lifetime_seconds": "evicted_age_ns",
    "vllm:kv_block_idle_before_evict_seconds": "evicted_idle_ns",
    "vllm:kv_block_reuse_gap_seconds": "reuse_gap_ns",
}
_STEP_SUMS = {
    ("vllm:generation_tokens_total",): "emitted_tokens",
    ("vllm:spec_decode_num_draft_tokens_total",): "drafted_tokens",
    ("vllm:spec_decode_num_accepted_tokens_total",): "accepted_tokens",
    ("vllm:estimated_flops_per_gpu_total",): "flops",
    ("vllm:estimated_read_bytes_per_gpu_total",): "bytes",  # minus the written bytes
}


class VllmNames:
    """Folds the records a second time, under vLLM's names. Costs a server that does not ask for them nothing."""

    def __init__(self, model_name: str, facts: EngineFacts):
        engine = {"engine": "0"}
        info = _info(facts)
        self._facts = facts
        self._series = Series(vllm_metrics(facts), {"model_name": model_name} | engine)
        self._config = Series([info], engine)
        self._config.numbers[info.name][info.values[0]] = 1
        self._adapters = Series([_ADAPTERS], {})
        self._numbers, self._histograms = self._series.numbers, self._series.histograms
        self._step_sums = ColumnSums(self._series, _STEP_SUMS)

    def observe_steps(self, steps: Steps) -> None:
        self._step_sums.add(steps)
        written = int(steps.tokens.sum()) * self._facts.kv_bytes_per_token
        self._numbers["vllm:estimated_write_bytes_per_gpu_total"][()] += written
        self._numbers["vllm:estimated_read_bytes_per_gpu_total"][()] -= written
        self._histograms["vllm:iteration_tokens_total"][()].observe_all(steps.tokens)
        for name, field in _SAMPLES.items():
            self._histograms[name][()].observe_all(steps.samples(field))
        drafted = draft_positions(steps, "drafted")
        self._numbers["vllm:spec_decode_num_drafts_total"][()] += drafted[0] if drafted else 0
        for position, count in enumerate(draft_positions(steps, "accepted")):
            self._numbers["vllm:spec_decode_num_accepted_tokens_per_pos_total"][(str(position),)] += count
        self._numbers["vllm:num_preemptions_total"][()] += len(steps.preemptions())

    def observe_request(self, request: RequestRecord) -> None:
        cached, prompt = request.cached_tokens, request.prompt_tokens
        if request.first_step is not None and self._facts.prefix_caching:
            self._numbers["vllm:prefix_cache_queries_total"][()] += prompt
            self._numbers["vllm:prefix_cache_hits_total"][()] += cached
        if request.token_ns:
            by_source = self._numbers["vllm:prompt_tokens_by_source_total"]
            by_source[("local_compute",)] += prompt - cached
            by_source[("local_cache_hit",)] += cached
            self._numbers["vllm:prompt_tokens_total"][()] += prompt
            self._observe("time_to_first_token_seconds", request.token_ns[0] - request.arrived_ns)
            # Several tokens of one step, as of several choices, are one observation.
            gaps = gaps_ns([request.token_ns])
            self._histograms["vllm:inter_token_latency_seconds"][()].observe_all(gaps[gaps > 0])
        ended = outcome(request)
        if ended == "content_filter":
            ended = "abort"  # vLLM filters nothing: its gateway, which does, would have left
        if ended != "abort":
            self._numbers["vllm:request_success_total"][(ended,)] += 1
        if ended in SERVED:
            self._observe_served(request)

    def page(self, gauges: PoolGauges) -> str:
        """The families as text. `gauges` are our own."""
        self._numbers["vllm:num_requests_running"][()] = gauges.running
        self._numbers["vllm:num_requests_waiting"][()] = gauges.waiting
        self._numbers["vllm:kv_cache_usage_perc"][()] = gauges.pool.usage if gauges.pool is not None else 0.0
        return self._series.page() + self._config.page() + self._adapters.page()

    def observe_adapters(self, max_loras: int, running: Collection[str], waiting: Collection[str]) -> None:
        """Names of the adapters that requests use now, and of those that others wait for."""
        samples = self._adapters.numbers[_ADAPTERS.name]
        samples.clear()
        samples[str(max_loras), ",".join(sorted(waiting)), ",".join(sorted(running))] = time.time()

    def _observe_served(self, request: RequestRecord) -> None:
        longest = request.longest_output_tokens or request.output_tokens
        self._observe("request_prompt_tokens", request.prompt_tokens)
        self._observe("request_generation_tokens", request.output_tokens)
        self._observe("request_max_num_generation_tokens", longest)
        self._observe("request_num_preemptions", request.preemptions)
        token_ns = request.token_ns
        if not token_ns:  # nothing was wanted but the prompt's scores
            return
        first, last = token_ns[0], token_ns[-1]
        self._observe("e2e_request_latency_seconds", last - request.arrived_ns)
        self._observe("request_decode_time_seconds", last - first)
        self._observe("request_time_per_output_token_seconds", (last - first) / max(1, longest - 1))
        if request.queued_ns is not None and request.scheduled_ns is not None:
            self._observe("request_queue_time_seconds", request.scheduled_ns - request.queued_ns)
            self._observe("request_prefill_time_seconds", first - request.scheduled_ns)
            self._observe("request_inference_time_seconds", last - request.scheduled_ns)

    def _observe(self, name: str, value: float) -> None:
        self._histograms[f"vllm:{name}"][()].observe(value)
