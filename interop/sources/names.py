"""The names of a page as its server writes them: without Ray's prefix, with a colon, counters with _total; those that
TensorRT-LLM's first versions wrote without a prefix with it."""

import re
from functools import cache

PREFIXES = re.compile(r"(?:ray_)?(vllm|sglang|lmdeploy|llamacpp)[:_](?!router)")
# Pages of routers: gauges of several servers that the router itself keeps, and no histogram of an engine.
ROUTED = frozenset({
    "vllm:avg_ttft", "vllm:avg_itl", "vllm:avg_latency", "vllm:current_qps", "vllm:avg_decoding_length",
    "vllm:healthy_pods_total", "vllm:num_prefill_requests", "vllm:num_decoding_requests",
    "vllm:num_incoming_requests_total",
})  # fmt: skip
ROUTERS = ("sgl_router_", "smg_", "sglang_router_", "sglang:router_", "vllm_router_", "vllm:router_")


# Names that no other server has without a prefix.
WITHOUT_PREFIX = re.compile(
    r"(?:e2e_request_latency|time_to_first_token|time_per_output_token|request_queue_time)_seconds(?:_bucket|_sum|_count)?"
    r"|request_success_total|kv_cache_utilization"
)


@cache
def canonical(name: str) -> str:
    """The name that the sources know, or the name as it is: `ray_vllm_prompt_tokens` → `vllm:prompt_tokens_total`."""
    from sojourn.interop.sources.registry import KNOWN  # here: the sources must be whole before their names are known

    if WITHOUT_PREFIX.fullmatch(name):
        return f"trtllm_{name}"
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
