"""Text Generation Inference: names of `router/src` and `backends/v3` (2.0 to 3.3).

What to know of its figures. Requests are counted by the router, which also queues them; the batch is what the shards
compute. It tells neither a time to first token nor a use of the KV cache. `tgi_request_mean_time_per_token_duration`
divides the whole inference by the tokens, the prompt's time included, so it is no time per output token: a summary
shows it under a name of its own.
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

E2E, QUEUE, INFERENCE = "tgi_request_duration", "tgi_request_queue_duration", "tgi_request_inference_duration"
IN_INFERENCE = "its time lies inside TGI's inference time, which does not tell it apart"

TGI = Source(
    key="tgi",
    title="TGI",
    version="3.3",
    prefix="tgi_",
    oldest="2.0",
    translations=(
        renamed("sojourn_request_running", "tgi_batch_current_size"),
        renamed("sojourn_request_waiting", "tgi_queue_size"),
        Translation(
            "sojourn_token_prompt_tokens_total", ((Term("tgi_request_input_length_sum"),),),
            differs="booked when the request is accepted",
        ),
        Translation(
            "sojourn_token_generated_tokens_total", ((Term("tgi_request_generated_tokens_sum"),),),
            differs="booked when the request ends",
        ),
        renamed("sojourn_request_finished_total", "tgi_request_success", differs="stop and length together"),
        renamed("sojourn_request_e2e_seconds", E2E, differs="validation, queue and inference"),
        renamed("sojourn_request_queue_seconds", QUEUE),
        renamed("sojourn_request_prompt_length_tokens", "tgi_request_input_length"),
        renamed("sojourn_request_output_length_tokens", "tgi_request_generated_tokens"),
    ),
    spans=(
        measured_span("validation", ("token.encode",), "tgi_request_validation_duration", "the prompt is tokenised"),
        measured_span("queue", ("request.queue", "memory.blocked"), QUEUE, "in the router's line, until batched"),
        measured_span(
            "inference", ("compute.prefill", "compute.decode", "request.interference", "compute.host", "token.sample"),
            INFERENCE, "batched → last token, prompt and answer together", before_first_token=False,
        ),
    ),
    latency=Latency(sum_of(E2E), count_of(E2E), ("client.network", "request.stream")),
    sights={
        "token.encode": partly("the mean over the run of request_validation_duration"),
        "request.queue": partly("the mean over the run of request_queue_duration, with waits for memory"),
        "memory.blocked": partly("inside request_queue_duration"),
        "compute.prefill": partly("inside request_inference_duration"),
        "compute.decode": partly("inside request_inference_duration"),
        **{name: unseen(IN_INFERENCE) for name in ("request.interference", "compute.host", "token.sample")},
    },
    settings={
        "batch cap": "--max-batch-size",
        "token budget": "--max-batch-prefill-tokens",
        "KV block pool": "--max-batch-total-tokens, --cuda-memory-fraction",
        "prefix cache": "PREFIX_CACHING=1",
    },
    ratios={
        "e2e_per_token_ms": (
            (Term("tgi_request_mean_time_per_token_duration_sum", scale=1e3),),
            count_of("tgi_request_mean_time_per_token_duration"),
        ),
    },
    own_labels=("method", "err", "reason"),
    steps=("tgi_batch_inference_count", "tgi_batch_forward_duration_count"),
)  # fmt: skip
