"""TensorRT-LLM's server: names of `tensorrt_llm/metrics/collector.py` (1.0 to 1.2, `trtllm-serve`).

What to know of its figures. Figures of requests take `return_perf_metrics: true`, those of steps
`enable_iter_perf_stats: true`, and both are booked when a request ends or somebody reads the statistics: gauges may
stand still. The counter of generated tokens is missing. Triton's `nv_*` families of the same server are not read.
"""

from sojourn.interop.sources.source import (
    Latency,
    Source,
    Term,
    Translation,
    count_of,
    measured_span,
    partly,
    renamed,
    sum_of,
    unseen,
)

E2E, QUEUE = "trtllm_e2e_request_latency_seconds", "trtllm_request_queue_time_seconds"
PREFILL, DECODE = "trtllm_request_prefill_time_seconds", "trtllm_request_decode_time_seconds"
IN_PHASES = "no metric of it: it lies between the queue and the last token"

TENSORRT_LLM = Source(
    key="tensorrt-llm",
    title="TensorRT-LLM",
    version="1.2",
    prefix="trtllm_",
    oldest="1.0",
    translations=(
        renamed(
            "sojourn_request_running", "trtllm_num_requests_running", "trtllm_num_active_requests",
            versions=("1.2 –", "1.1"), differs="as of the last statistics that were read",
        ),
        renamed(
            "sojourn_request_waiting", "trtllm_num_requests_waiting", "trtllm_server_queue_length",
            versions=("1.2 –", "1.1"), differs="as of the last statistics that were read",
        ),
        renamed("sojourn_memory_kv_usage_ratio", "trtllm_kv_cache_utilization"),
        renamed(
            "sojourn_token_prompt_tokens_total", "trtllm_prompt_tokens_total", differs="booked when the request ends"
        ),
        renamed("sojourn_token_drafted_tokens_total", "trtllm_spec_decode_drafted_tokens_total"),
        renamed("sojourn_token_accepted_tokens_total", "trtllm_spec_decode_accepted_tokens_total"),
        Translation(
            "sojourn_memory_prefix_tokens_total", ((Term("trtllm_prompt_cached_tokens_total"),),),
            labels=(("result", "hit"),), differs="booked when the request ends",
        ),
        Translation(
            "sojourn_memory_prefix_tokens_total",
            ((Term("trtllm_prompt_tokens_total"), Term("trtllm_prompt_cached_tokens_total", sign=-1)),),
            labels=(("result", "miss"),), differs="prompt tokens less cached ones",
        ),
        renamed(
            "sojourn_request_finished_total", "trtllm_request_success_total",
            differs="not by outcome: all that ended, whatever finished_reason says",
        ),
        renamed("sojourn_request_ttft_seconds", "trtllm_time_to_first_token_seconds", differs="booked at the end"),
        renamed("sojourn_request_tpot_seconds", "trtllm_time_per_output_token_seconds", differs="booked at the end"),
        renamed("sojourn_request_e2e_seconds", E2E),
        renamed("sojourn_request_queue_seconds", QUEUE, differs="until first scheduled, whatever it waited for"),
    ),
    spans=(
        measured_span("queue", ("request.queue", "memory.blocked"), QUEUE, "in the waiting line, until scheduled"),
        measured_span(
            "prefill", ("compute.prefill", "request.interference", "compute.host", "token.sample"), PREFILL,
            "scheduled → first token, with all that other requests and the host added",
        ),
        measured_span(
            "decode", ("compute.decode", "request.interference", "compute.host", "token.sample"), DECODE,
            "first → last token, with all that other requests and the host added", before_first_token=False,
        ),
    ),
    latency=Latency(sum_of(E2E), count_of(E2E), ("client.network", "token.decode", "request.stream")),
    sights={
        "request.queue": partly("the mean over the run of request_queue_time, which also holds waits for KV blocks"),
        "memory.blocked": partly("inside request_queue_time; beside a KV use below 1 it is not what they waited for"),
        "compute.prefill": partly("since 1.2 the mean of request_prefill_time, which also holds others' work"),
        "compute.decode": partly("since 1.2 the mean of request_decode_time, which also holds others' work"),
        **{name: unseen(IN_PHASES) for name in ("request.interference", "compute.host", "token.sample")},
    },
    settings={
        "batch cap": "max_batch_size",
        "token budget": "max_num_tokens",
        "KV block pool": "kv_cache_config.free_gpu_memory_fraction, kv_cache_config.dtype",
        "prefix cache": "kv_cache_config.enable_block_reuse",
        "block": "kv_cache_config.tokens_per_block",
    },
    own_labels=("engine_type", "finished_reason", "token_position", "http_code"),
    steps=("trtllm_prefill_batch_tokens_count",),
    stands_s=30.0,
    phases_at_end=True,
)  # fmt: skip
