"""The frontend of NVIDIA Dynamo: names of `lib/runtime/src/metrics/prometheus_names.rs` (0.4 to 1.6).

What to know of its figures. It is a front of several workers: `queued_requests` waits for a worker's first answer,
which is queue and prefill of the engine behind. The workers have pages of their own, with the names of their engines:
watch those for causes. Families appear with their first event.
"""

from sojourn.interop.sources.source import Latency, Source, count_of, renamed, sum_of, unseen

E2E = "dynamo_frontend_request_duration_seconds"
BEHIND = "it happens in a worker: watch the worker's own page"
ACCOUNTS = ("request.queue", "memory.blocked", "compute.prefill", "compute.decode", "request.interference",
            "memory.preempted")  # fmt: skip

DYNAMO = Source(
    key="dynamo",
    title="Dynamo",
    version="1.6",
    prefix="dynamo_frontend_",
    oldest="0.4",
    translations=(
        renamed(
            "sojourn_request_running",
            "dynamo_frontend_inflight_requests",
            differs="of the front: all that is not answered yet",
        ),
        renamed(
            "sojourn_request_waiting",
            "dynamo_frontend_queued_requests",
            differs="of the front: those without a first answer, whose prompts a worker may compute",
        ),
        renamed("sojourn_token_generated_tokens_total", "dynamo_frontend_output_tokens_total"),
        renamed(
            "sojourn_request_finished_total", "dynamo_frontend_requests_total", differs="also those that failed"
        ),
        renamed("sojourn_request_ttft_seconds", "dynamo_frontend_time_to_first_token_seconds"),
        renamed("sojourn_request_itl_seconds", "dynamo_frontend_inter_token_latency_seconds"),
        renamed("sojourn_request_e2e_seconds", E2E),
        renamed("sojourn_request_prompt_length_tokens", "dynamo_frontend_input_sequence_tokens"),
        renamed("sojourn_request_output_length_tokens", "dynamo_frontend_output_sequence_tokens"),
    ),
    spans=(),
    latency=Latency(sum_of(E2E), count_of(E2E), ("client.network",)),
    sights={account: unseen(BEHIND) for account in ACCOUNTS},
    settings={},
    own_labels=("worker_id", "dp_rank", "worker_type", "status", "request_type", "endpoint", "error_type"),
    live_gaps=True,
)  # fmt: skip
