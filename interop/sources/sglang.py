"""SGLang: facts read from the code of its wheel 0.5.23 (srt/observability, srt/managers/tokenizer_manager.py).

What to know of its figures. /metrics exists only with `--enable-metrics`. The tokenizer process books a request when
it is finished (tokens, TTFT, end to end); each scheduler books its queue and its stages. With data-parallel attention
the schedulers of one `dp_rank` see the same requests, and with `--enable-metrics-for-all-schedulers` each of them
reports, under a `tp_rank` of its own that need not be 0: one of them speaks for all. With priorities, the gauges have
a series a priority beside their total, whose label is empty. Gauges are written every few dozen decode steps, so that
between scrapes they may stand still. FLOPs and bytes are left out: its estimate counts weights once a token and knows
no experts. `time_per_output_token_seconds` of versions up to 0.4.4 is left out: it observes running means of whole
requests, also with the time to the first token in them. Names of older versions are those of the wheels since 0.3.6.
"""

from sojourn.interop.sources.source import (
    Latency,
    SettingGauge,
    Source,
    Span,
    Sum,
    Term,
    Translation,
    count_of,
    measured_span,
    partly,
    renamed,
    sum_of,
    unseen,
)

TTFT, E2E, QUEUE = (
    "sglang:time_to_first_token_seconds",
    "sglang:e2e_request_latency_seconds",
    "sglang:queue_time_seconds",
)
STAGE = "sglang:per_stage_req_latency_seconds"
EFFECTIVE = "sglang:prefill_effective_tokens_total"
HIT_MODES = ("device_hit", "host_hit", "storage_hit")
RANKS = ("pp_rank", "tp_rank", "moe_ep_rank")
PREFIX_VERSIONS = ("0.5.20 –", "0.4.4 –")
IN_PHASES = "its time lies inside SGLang's prefill and decode times, which do not tell it apart"


def _modes(*modes: str) -> Sum:
    return tuple(Term(EFFECTIVE, (("mode", mode),)) for mode in modes)


SGLANG = Source(
    key="sglang",
    title="SGLang",
    version="0.5.23",
    prefix="sglang:",
    oldest="0.3.6",
    translations=(
        renamed("sojourn_request_running", "sglang:num_running_reqs"),
        Translation(
            "sojourn_request_waiting",
            ((Term("sglang:num_queue_reqs"), Term("sglang:num_grammar_queue_reqs")), (Term("sglang:num_queue_reqs"),)),
            versions=("0.4.7 –", "0.3.6 – 0.4.6"),
            differs="the line for grammars included",
        ),
        Translation(
            "sojourn_memory_kv_usage_ratio",
            ((Term("sglang:token_usage"),),),
            largest=True,
            differs="of tokens; of several pools and replicas the fullest",
        ),
        renamed("sojourn_token_prompt_tokens_total", "sglang:prompt_tokens_total"),
        renamed("sojourn_token_generated_tokens_total", "sglang:generation_tokens_total"),
        Translation(
            "sojourn_memory_preemptions_total",
            ((Term("sglang:num_retracted_requests_total"),), (Term("sglang:num_retractions_sum"),)),
            begins_beside="sglang:realtime_tokens_total",
            versions=("0.5.7 –", "0.5.5 – 0.5.6"),
            differs="SGLang says retracted; num_retractions is booked when the request ends",
        ),
        Translation(
            "sojourn_memory_prefix_tokens_total",
            (_modes(*HIT_MODES), (Term("sglang:cached_tokens_total"),)),
            labels=(("result", "hit"),),
            versions=PREFIX_VERSIONS,
            differs="device, host and storage together",
        ),
        Translation(
            "sojourn_memory_prefix_tokens_total",
            (_modes("input"), (Term("sglang:prompt_tokens_total"), Term("sglang:cached_tokens_total", sign=-1))),
            labels=(("result", "miss"),),
            versions=PREFIX_VERSIONS,
        ),
        renamed(
            "sojourn_request_finished_total",
            "sglang:num_requests_total",
            f"{E2E}_count",
            versions=("0.4.2 –", "0.3.6 – 0.4.1"),
            differs="not by outcome: stop, length and what was aborted in flight are not separated",
        ),
        renamed(
            "sojourn_compute_device_seconds_total",
            "sglang:forward_execution_seconds_total",
            "sglang:gpu_execution_seconds_total",
            versions=("0.5.11 –", "0.5.7 – 0.5.10"),
            differs="forward passes of one rank of each replica, by device events; sampling is not in it",
        ),
        renamed(
            "sojourn_request_ttft_seconds", TTFT, differs="from the tokenizer process's receipt to its first output"
        ),
        renamed(
            "sojourn_request_itl_seconds",
            "sglang:inter_token_latency_seconds",
            versions=("0.4.4 –",),
            differs="a gap with several tokens counts once per token, each with its part of it",
        ),
        renamed(
            "sojourn_request_tpot_seconds",
            "sglang:request_time_per_output_token_seconds",
            versions=("0.5.23 –",),
            differs="between the first and the last output of the tokenizer process",
        ),
        renamed("sojourn_request_e2e_seconds", E2E, differs="until the tokenizer process had the last text"),
        renamed(
            "sojourn_request_queue_seconds",
            QUEUE,
            "sglang:queue_time_s",
            versions=("0.5.3 –", "0.5.2"),
            differs="until first scheduled, whatever it waited for: KV, too",
        ),
        renamed("sojourn_request_prompt_length_tokens", "sglang:prompt_tokens_histogram", versions=("0.4.7 –",)),
        renamed("sojourn_request_output_length_tokens", "sglang:generation_tokens_histogram", versions=("0.4.7 –",)),
    ),
    spans=(
        measured_span(
            "receive",
            ("request.admission",),
            STAGE,
            "received by the scheduler → in its waiting line",
            stage="request_process",
        ),
        measured_span(
            "queue",
            ("request.queue", "memory.blocked"),
            QUEUE,
            "in the scheduler's waiting line, until first scheduled",
        ),
        measured_span(
            "prefill",
            ("compute.prefill", "request.interference", "compute.host", "token.sample"),
            STAGE,
            "first scheduled → prompt computed, chunks and what lies between them included",
            stage="prefill_forward",
        ),
        Span(
            "decode",
            (
                "compute.decode",
                "request.interference",
                "compute.host",
                "token.sample",
                "memory.preempted",
                "memory.recompute",
                "token.decode",
            ),
            (*sum_of(E2E), Term(f"{TTFT}_sum", sign=-1)),
            count_of(E2E),
            (),
            (),
            "first output → last text in the tokenizer process: end to end less TTFT, so a difference of two means",
        ),
    ),
    latency=Latency(sum_of(E2E), count_of(E2E), ("client.network", "request.stream")),
    sights={
        "client.network": unseen("SGLang exports no moment at which a request reached its socket or left it"),
        "token.encode": unseen("no metric of it, only a trace slice: it lies between TTFT's beginning and the queue"),
        "request.admission": partly("the mean over the run of the stage request_process; the way there is not in it"),
        "request.queue": partly("the mean over the run of queue_time, which also holds waits for KV"),
        "memory.blocked": partly("inside queue_time; beside a token_usage below 1 it is not what they waited for"),
        "compute.prefill": partly("the mean over the run of the stage prefill_forward, which also holds others' work"),
        "request.interference": unseen(IN_PHASES),
        "memory.preempted": partly(
            "how often (num_retracted_requests), not how long: the wait lies in the decode time"
        ),
        "memory.recompute": partly("how many tokens were thrown away (num_retracted_*_tokens), not how long"),
        "memory.load": unseen("SGLang exports no request's wait for KV of a slower tier"),
        "memory.store": unseen("SGLang times no store of KV to a slower tier by request"),
        "compute.communication": unseen(IN_PHASES),
        "compute.bubble": unseen(IN_PHASES),
        "compute.stall": unseen("a step that stands still lies in the phases of its requests; the probe shows it"),
        "memory.transfer": unseen("SGLang times the KV transfers of a server, not a request's wait for its own"),
        "compute.draft": unseen("SGLang proposes drafts within its steps, and times the whole step"),
        "compute.decode": partly("end to end less TTFT, a mean over the run, which also holds others' work"),
        "compute.host": unseen("seconds of the scheduler's loop by stage (scheduler_stage_seconds), of no request"),
        "token.sample": unseen(IN_PHASES),
        "token.decode": unseen("it lies inside end to end less TTFT"),
        "request.stream": unseen("SGLang's latencies end before the answer is written"),
        "request.lost": unseen("SGLang counts only what its scheduler finished"),
        "request.quota": unseen("SGLang limits no tenants: a gateway before it does"),
        "request.routing": unseen("SGLang's latencies begin behind the router"),
        "request.remote_prefill": unseen("SGLang exports no request's wait for a prefill server"),
        "request.cold_start": unseen("SGLang serves one model, which is loaded before it answers"),
        "memory.adapter_load": unseen("no metric of it"),
        "request.moderation": unseen("SGLang checks no content: a gateway before it does"),
    },
    settings={
        "batch cap": "--max-running-requests",
        "KV block pool": "--mem-fraction-static, --kv-cache-dtype fp8_e5m2",
        "prefix cache": "no --disable-radix-cache",
        "block": "--page-size",
    },
    steps=("sglang:realtime_tokens_total", "sglang:gen_throughput", "sglang:num_used_tokens"),
    stands_s=30.0,
    live_gaps=True,
    engine_label="dp_rank",
    engine_counters=("sglang:realtime_tokens_total",),
    grammar_line=Term("sglang:num_grammar_queue_reqs"),
    setting_gauges={"block_size": SettingGauge("sglang:page_size"), "num_kv_blocks": SettingGauge("sglang:num_pages")},
    own_labels=(
        "engine_type",
        "dp_rank",
        "is_streaming",
        "mode",
        "category",
        "stage",
        "cache_source",
    ),
    rank_labels=RANKS,
    part_label="priority",
)
