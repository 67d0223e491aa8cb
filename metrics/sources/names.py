"""The names of a page as vLLM and SGLang write them: without Ray's prefix, with a colon, counters with _total."""

import re
from functools import cache

PREFIXES = re.compile(r"(?:ray_)?(vllm|sglang)[:_](?!router)")
# Pages of routers: gauges of several servers that the router itself keeps, and no histogram of an engine.
ROUTED = frozenset({
    "vllm:avg_ttft", "vllm:avg_itl", "vllm:avg_latency", "vllm:current_qps", "vllm:avg_decoding_length",
    "vllm:healthy_pods_total", "vllm:num_prefill_requests", "vllm:num_decoding_requests",
    "vllm:num_incoming_requests_total",
})  # fmt: skip
ROUTERS = ("sgl_router_", "smg_", "sglang_router_", "sglang:router_", "vllm_router_", "vllm:router_")
# Family of ours → their names by version, newest first. "" is the present one.
BY_VERSION = {
    "sojourn_memory_kv_usage_ratio": {
        "vLLM": (("vllm:kv_cache_usage_perc", "0.10 to 0.33"), ("vllm:gpu_cache_usage_perc", "0.6 to 0.10")),
        "SGLang": (("sglang:token_usage", "all"),),
    },
    "sojourn_request_itl_seconds": {
        "vLLM": (("vllm:inter_token_latency_seconds", "0.11 to 0.33"),
                 ("vllm:time_per_output_token_seconds", "0.6 to 0.11")),
        "SGLang": (("sglang:inter_token_latency_seconds", "since 0.4.4"),
                   ("sglang:time_per_output_token_seconds", "before")),
    },
    "sojourn_request_tpot_seconds": {
        "vLLM": (("vllm:request_time_per_output_token_seconds", "0.11 to 0.33; before it no metric shows TPOT"),),
        "SGLang": (("sglang:request_time_per_output_token_seconds", "since 0.5.2; before it no metric shows TPOT"),),
    },
    "sojourn_memory_prefix_tokens_total": {
        "vLLM": (("vllm:prefix_cache_hits_total", "0.9 to 0.33"),
                 ("vllm:gpu_prefix_cache_hits_total", "0.8 to 0.10; before it only a ratio")),
        "SGLang": (("sglang:prefill_effective_tokens_total", "since 0.5.2"), ("sglang:cached_tokens_total", "before")),
    },
}  # fmt: skip


@cache
def canonical(name: str) -> str:
    """The name that the sources know, or the name as it is: `ray_vllm_prompt_tokens` → `vllm:prompt_tokens_total`."""
    from metrics.sources.registry import KNOWN  # here: the sources must be whole before their names are known

    found = PREFIXES.match(name)
    if found is None:
        return name
    plain = f"{found[1]}:{name[found.end() :]}"
    for each in (plain, f"{plain}_total", plain.removesuffix("_total")):
        if each in KNOWN:
            return each
    return plain if ":" in found[0] else name


def is_router(names: set[str]) -> bool:
    """Whether a page is a router's: what it shows are its own views of servers, no engine's counters."""
    return bool(names & ROUTED) or any(name.startswith(ROUTERS) for name in names)
