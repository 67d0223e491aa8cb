"""LMDeploy: names of `lmdeploy/metrics/loggers.py` (0.9 to 0.13), which follow those of vLLM. /metrics exists only with
`--enable-metrics`.

What to know of its figures. Each engine of data-parallel ranks has the label `engine`. Requests that wait for a free
handle of the API (`num_api_requests_waiting`) stand before the engine's own line, and both are a wait.
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

E2E = "lmdeploy:e2e_request_latency_seconds"
QUEUE, PREFILL, DECODE = (f"lmdeploy:request_{phase}_time_seconds" for phase in ("queue", "prefill", "decode"))
IN_PHASES = "its time lies inside LMDeploy's prefill and decode times, which do not tell it apart"

LMDEPLOY = Source(
    key="lmdeploy",
    title="LMDeploy",
    version="0.13",
    prefix="lmdeploy:",
    oldest="0.9",
    translations=(
        renamed("sojourn_request_running", "lmdeploy:num_requests_running"),
        Translation(
            "sojourn_request_waiting",
            (
                (Term("lmdeploy:num_requests_waiting"), Term("lmdeploy:num_api_requests_waiting")),
                (Term("lmdeploy:num_requests_waiting"),),
            ),
            versions=("0.11 –", "0.9 – 0.10"),
            differs="with those that wait for a free handle of the API",
        ),
        renamed("sojourn_memory_kv_usage_ratio", "lmdeploy:gpu_cache_usage_perc"),
        renamed("sojourn_token_prompt_tokens_total", "lmdeploy:prompt_tokens_total"),
        renamed("sojourn_token_generated_tokens_total", "lmdeploy:generation_tokens_total"),
        renamed("sojourn_token_drafted_tokens_total", "lmdeploy:spec_decode_num_draft_tokens_total"),
        renamed("sojourn_token_accepted_tokens_total", "lmdeploy:spec_decode_num_accepted_tokens_total"),
        renamed(
            "sojourn_request_finished_total",
            "lmdeploy:request_success_total",
            differs="not by outcome: all that ended, whatever finished_reason says",
        ),
        renamed("sojourn_request_ttft_seconds", "lmdeploy:time_to_first_token_seconds"),
        renamed(
            "sojourn_request_itl_seconds",
            "lmdeploy:iter_token_latency",
            differs="between two outputs, also where one had several tokens",
        ),
        renamed(
            "sojourn_request_tpot_seconds",
            "lmdeploy:time_per_output_token_seconds",
            differs="of each output, by its number of tokens, and not of a whole request",
        ),
        renamed("sojourn_request_e2e_seconds", E2E),
        renamed("sojourn_request_queue_seconds", QUEUE, differs="until first scheduled, whatever it waited for"),
        renamed("sojourn_request_prompt_length_tokens", "lmdeploy:request_prompt_tokens"),
        renamed("sojourn_request_output_length_tokens", "lmdeploy:request_generation_tokens"),
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
        "compute.prefill": partly("the mean over the run of request_prefill_time, which also holds others' work"),
        "compute.decode": partly("the mean over the run of request_decode_time, which also holds others' work"),
        **{name: unseen(IN_PHASES) for name in ("request.interference", "compute.host", "token.sample")},
    },
    settings={
        "batch cap": "--max-batch-size",
        "token budget": "--max-prefill-token-num",
        "KV block pool": "--cache-max-entry-count, --quant-policy",
        "prefix cache": "--enable-prefix-caching",
        "block": "--cache-block-seq-len",
    },
    own_labels=("engine", "finished_reason", "position"),
    steps=("lmdeploy:iteration_tokens_total_count",),
    live_gaps=True,
    phases_at_end=True,
    engine_label="engine",
    engine_counters=("lmdeploy:prompt_tokens_total", "lmdeploy:generation_tokens_total"),
)  # fmt: skip
