"""Pages of old and new versions of vLLM and SGLang, with their names: right figures, or what is missing."""

from dataclasses import dataclass, field

import pytest

from sojourn.live.watch.observer import Observer

S = 1_000_000_000
SECONDS = 20
# What happens in each second: requests that end, their tokens, and times of each in seconds.
ENDED, PROMPT, OUTPUT, HITS, TTFT, GAP, E2E, QUEUE = 2, 100, 20, 30, 0.2, 0.02, 0.6, 0.05
VLLM = {
    "prompt_tokens_total": ENDED * PROMPT, "generation_tokens_total": ENDED * OUTPUT, "num_preemptions_total": 0,
    "request_success_total": ENDED, "time_to_first_token_seconds": (ENDED, TTFT), "e2e_request_latency_seconds":
    (ENDED, E2E),
}  # fmt: skip
QUEUED = {"request_queue_time_seconds": (ENDED, QUEUE)}
GAPS_BEFORE, GAPS = ({name: (ENDED * (OUTPUT - 1), GAP)} for name in
                     ("time_per_output_token_seconds", "inter_token_latency_seconds"))  # fmt: skip
SGLANG = {
    "prompt_tokens_total": ENDED * PROMPT, "generation_tokens_total": ENDED * OUTPUT,
    "time_to_first_token_seconds": (ENDED, TTFT), "e2e_request_latency_seconds": (ENDED, E2E),
}  # fmt: skip


@dataclass(frozen=True)
class Version:
    prefix: str
    gauges: dict[str, float]
    grows: dict[str, float | tuple[float, float]]  # a second's gain; of a histogram its observations and their value
    waiting: float = 3
    unknown: frozenset[str] = field(default_factory=frozenset)  # of the figures below


VERSIONS = {
    "vLLM 0.6.0": Version(
        "vllm:",
        {"num_requests_running": 4, "num_requests_waiting": 1, "num_requests_swapped": 2, "gpu_cache_usage_perc": 0.4,
         "cpu_cache_usage_perc": 0.9, "gpu_prefix_cache_hit_rate": 0.3, "avg_generation_throughput_toks_per_s": 7},
        VLLM | GAPS_BEFORE, unknown=frozenset({"hit_rate", "queue"}),
    ),
    "vLLM 0.6.4": Version(
        "vllm:",
        {"num_requests_running": 4, "num_requests_waiting": 3, "num_requests_swapped": 0, "gpu_cache_usage_perc": 0.4},
        VLLM | GAPS_BEFORE | QUEUED | {"time_in_queue_requests": (ENDED, 9.0)}, unknown=frozenset({"hit_rate"}),
    ),
    "vLLM 0.8 (V1)": Version(
        "vllm:", {"num_requests_running": 4, "num_requests_waiting": 3, "gpu_cache_usage_perc": 0.4},
        VLLM | GAPS_BEFORE | QUEUED
        | {"gpu_prefix_cache_queries_total": ENDED * PROMPT, "gpu_prefix_cache_hits_total": ENDED * HITS},
    ),
    "vLLM 0.10": Version(
        "vllm:",
        {"num_requests_running": 4, "num_requests_waiting": 3, "gpu_cache_usage_perc": 0.4, "kv_cache_usage_perc": 0.4},
        VLLM | GAPS_BEFORE | QUEUED
        | {"gpu_prefix_cache_queries_total": ENDED * PROMPT, "gpu_prefix_cache_hits_total": ENDED * HITS,
           "prefix_cache_queries_total": ENDED * PROMPT, "prefix_cache_hits_total": ENDED * HITS},
    ),
    "vLLM 0.11": Version(
        "vllm:", {"num_requests_running": 4, "num_requests_waiting": 3, "kv_cache_usage_perc": 0.4},
        VLLM | GAPS_BEFORE | GAPS | QUEUED
        | {"prefix_cache_queries_total": ENDED * PROMPT, "prefix_cache_hits_total": ENDED * HITS},
    ),
    "vLLM 0.13 in Ray": Version(
        "ray_vllm_", {"num_requests_running": 4, "num_requests_waiting": 3, "kv_cache_usage_perc": 0.4},
        VLLM | GAPS | QUEUED
        | {"prefix_cache_queries_total": ENDED * PROMPT, "prefix_cache_hits_total": ENDED * HITS},
    ),
    "SGLang 0.3.6": Version(
        "sglang:", {"num_running_reqs": 4, "num_queue_reqs": 3, "token_usage": 0.4, "cache_hit_rate": 0.3},
        SGLANG | {"time_per_output_token_seconds": (ENDED * OUTPUT, 0.3)},
        unknown=frozenset({"hit_rate", "queue", "gaps", "preemptions"}),
    ),
    "SGLang 0.4.4": Version(
        "sglang:", {"num_running_reqs": 4, "num_queue_reqs": 3, "token_usage": 0.4},
        SGLANG | GAPS | {"num_requests_total": ENDED, "cached_tokens_total": ENDED * HITS,
                         "time_per_output_token_seconds": (ENDED, 0.3)},
        unknown=frozenset({"queue", "preemptions"}),
    ),
    "SGLang 0.5.2": Version(
        "sglang:", {"num_running_reqs": 4, "num_queue_reqs": 1, "num_grammar_queue_reqs": 2, "token_usage": 0.4},
        SGLANG | GAPS | {"num_requests_total": ENDED, "cached_tokens_total": ENDED * HITS,
                         "queue_time_s": (ENDED, QUEUE)},
        unknown=frozenset({"preemptions"}),
    ),
    "SGLang 0.5.6": Version(
        "sglang:", {"num_running_reqs": 4, "num_queue_reqs": 1, "num_grammar_queue_reqs": 2, "token_usage": 0.4},
        SGLANG | GAPS | {"num_requests_total": ENDED, "cached_tokens_total": ENDED * HITS,
                         "queue_time_seconds": (ENDED, QUEUE), "num_retractions": (ENDED, 0.0)},
    ),
    "SGLang 0.5.9": Version(
        "sglang:", {"num_running_reqs": 4, "num_queue_reqs": 1, "num_grammar_queue_reqs": 2, "token_usage": 0.4},
        SGLANG | GAPS | {"num_requests_total": ENDED, "cached_tokens_total": ENDED * HITS, "queue_time_seconds":
                         (ENDED, QUEUE), "realtime_tokens_total": 90, "gpu_execution_seconds_total": 0.5},
    ),
    "SGLang 0.5.23": Version(
        "sglang_", {"num_running_reqs": 4, "num_queue_reqs": 1, "num_grammar_queue_reqs": 2, "token_usage": 0.4},
        SGLANG | GAPS | {"num_requests_total": ENDED, "cached_tokens_total": ENDED * HITS, "queue_time_seconds":
                         (ENDED, QUEUE), "realtime_tokens_total": 90, "forward_execution_seconds_total": 0.5},
    ),
}  # fmt: skip


def page(version: Version, second: int) -> list[dict]:
    labels = [("model_name", "m")]
    found = [(name, labels, value) for name, value in version.gauges.items()]
    for name, gain in version.grows.items():
        own = [*labels, ("finished_reason", "stop")] if "success" in name else labels
        if isinstance(gain, tuple):
            count = gain[0] * second
            found += [(f"{name}_count", own, count), (f"{name}_sum", own, count * gain[1])]
            found += [(f"{name}_bucket", [*own, ("le", "+Inf")], count)]
        else:
            found.append((name, own, gain * second))
    return [{"name": version.prefix + name, "labels": own, "value": float(value)} for name, own, value in found]


def watched(version: Version):
    observer = Observer("x", "x", {}, window_s=60.0)
    for second in range(SECONDS + 1):
        observer.add(second * S, page(version, second))
    return observer.watched()


@pytest.mark.parametrize("name", VERSIONS)
def test_a_page_of_each_version_gives_the_right_figures_or_none(name):
    version = VERSIONS[name]
    found = watched(version)
    assert (found.now.requests_per_s, found.now.output_tokens_per_s, found.now.prompt_tokens_per_s) == pytest.approx(
        (ENDED, ENDED * OUTPUT, ENDED * PROMPT))  # fmt: skip
    assert (found.now.running, found.now.waiting, found.now.kv_use) == (4, version.waiting, 0.4)
    assert found.view.finished == ENDED * SECONDS and found.view.server_ms == pytest.approx(1e3 * E2E)
    latencies = {name: shown.mean for name, shown in found.view.latencies.items()}
    assert latencies["sojourn_request_ttft_seconds"] == pytest.approx(TTFT)
    figures = {
        "hit_rate": (found.view.hit_rate, HITS / PROMPT), "preemptions": (found.view.preemptions, 0),
        "gaps": (latencies.get("sojourn_request_itl_seconds"), GAP),
        "queue": (latencies.get("sojourn_request_queue_seconds"), QUEUE),
    }  # fmt: skip
    for figure, (shown, right) in figures.items():
        assert shown == (None if figure in version.unknown else pytest.approx(right)), figure


def test_a_page_without_counters_is_named_and_not_healthy():
    gauges = {"num_requests_running": 4.0, "num_requests_waiting": 0.0, "gpu_cache_usage_perc": 0.4}
    found = watched(Version("vllm:", gauges | {"avg_generation_throughput_toks_per_s": 80.0}, {}))
    assert found.state == "cannot tell" and "older than vLLM 0.6" in found.headline
