"""LiteLLM's proxy: names of `litellm/types/integrations/prometheus.py` (1.4x to 1.95, callback `prometheus`).

What to know of its figures. It is a front: it queues nothing for an engine, and what happens behind it is one latency,
that of its call. Its own work is the overhead, which a histogram shows since 1.7x and the header
`x-litellm-overhead-duration-ms` shows of each answer. Families appear with their first event, tokens are booked when a
request ends, and a time to first token is of streamed answers only, without the proxy's own time. The gauge of
requests in flight is of one worker process.
"""

from sojourn.interop.sources.source import (
    Latency,
    Source,
    Span,
    count_of,
    measured_span,
    partly,
    renamed,
    sum_of,
    unseen,
)

E2E, UPSTREAM = "litellm_request_total_latency_metric", "litellm_llm_api_latency_metric"
OVERHEAD, TTFT = "litellm_overhead_latency_metric", "litellm_llm_api_time_to_first_token_metric"
ARRIVAL = "litellm_request_queue_time_seconds"
BEHIND = "it happens in the server behind: watch that server's own page"
OF_SERVER = ("request.queue", "memory.blocked", "compute.prefill", "compute.decode", "request.interference",
             "compute.host", "token.sample")  # fmt: skip

LITELLM = Source(
    key="litellm",
    title="LiteLLM",
    version="1.95",
    prefix="litellm_",
    oldest="1.4",
    translations=(
        renamed("sojourn_request_running", "litellm_in_flight_requests", versions=("1.8 –",),
                differs="of one worker process: all HTTP requests that are not answered yet"),
        renamed("sojourn_token_prompt_tokens_total", "litellm_input_tokens_metric_total",
                differs="booked when the request ends, as the server behind counts them"),
        renamed("sojourn_token_generated_tokens_total", "litellm_output_tokens_metric_total",
                differs="booked when the request ends, as the server behind counts them"),
        renamed("sojourn_request_finished_total", "litellm_proxy_total_requests_metric_total",
                "litellm_requests_metric_total", versions=("1.5 –", "1.4"), differs="also those that failed"),
        renamed("sojourn_request_ttft_seconds", TTFT,
                differs="of streamed answers, from the proxy's call to the first chunk of the server behind"),
        renamed("sojourn_request_e2e_seconds", E2E, differs="of answers without an error"),
    ),
    spans=(
        measured_span("arrival", ("request.admission",), ARRIVAL, "arrived → taken up by the proxy's loop"),
        measured_span("overhead", ("request.routing",), OVERHEAD,
                      "the proxy's own work: keys, limits, hooks, translation"),
        Span("server", OF_SERVER, sum_of(UPSTREAM), count_of(UPSTREAM), sum_of(TTFT), count_of(TTFT),
             "the proxy's call to the server behind, its network included"),
    ),
    latency=Latency(sum_of(E2E), count_of(E2E), ("client.network",)),
    sights={
        "request.admission": partly("the mean over the run of request_queue_time_seconds, since 1.8"),
        "request.routing": partly("the mean over the run of overhead_latency; of each answer in its headers"),
        **{name: unseen(BEHIND) for name in (*OF_SERVER, "memory.preempted")},
    },
    settings={},
    own_labels=(
        "api_base", "api_key_alias", "api_provider", "client_ip", "end_user", "exception_class", "exception_status",
        "hashed_api_key", "litellm_model_name", "model", "model_group", "model_id", "org_alias", "org_id",
        "requested_model", "route", "status_code", "team", "team_alias", "user", "user_agent", "user_email",
    ),
    steps=("litellm_deployment_total_requests_total",),
    phases_at_end=True,
)  # fmt: skip
