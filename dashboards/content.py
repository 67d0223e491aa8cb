"""Which panels stand on which dashboard: one dashboard a lifecycle, every metric of the catalogue on exactly one."""

from dataclasses import dataclass

from sojourn.dashboards.views import (
    SUMMED,
    Panel,
    Query,
    gauge,
    gauges,
    heatmap,
    increase,
    per_request,
    quantiles,
    rate,
    rates,
    share,
)
from sojourn.metrics.catalog.catalog import GOOD


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


_LOOKUPS = "sojourn_memory_prefix_tokens_total"
_OUTCOMES = "sojourn_memory_prefix_outcome_tokens_total"
_OBJECTIVE = "sojourn_request_objective_total"
_GOOD = f'objective="{GOOD}"'
_RESTARTS = increase("sojourn_telemetry_core_restarts_total")
_BY_TENANT = "sojourn_request_tenant_requests_total"
_PRICE = "sojourn_request_price_total"
_JUDGED = 'outcome=~"met|missed"'

REQUEST = (
    Row("What users experience", (
        share("Attainment", rate(_OBJECTIVE, where=f'{_GOOD},outcome="met"'), rate(_OBJECTIVE, where=_GOOD),
              "good requests", shape="number", width=4,
              note="Share of the ended requests that met every objective of their class; empty without objectives."),
        gauges("Running and waiting", "sojourn_request_running", "sojourn_request_waiting", width=10),
        rates("Ended, by outcome", "sojourn_request_finished_total", by="outcome", shape="stack", width=10),
        gauges("Age of the oldest request without a token", "sojourn_request_oldest_wait_seconds", operator="max",
               limits=(5, 30)),
        gauges("Objectives", "sojourn_request_objective_bound_seconds", by="klass, objective", operator="max"),
        quantiles("Time to first token", "sojourn_request_ttft_seconds"),
        quantiles("Inter-token latency", "sojourn_request_itl_seconds"),
        quantiles("Time per output token", "sojourn_request_tpot_seconds"),
        heatmap("Inter-token latency: where the gaps lie", "sojourn_request_itl_seconds", width=12),
        quantiles("End to end", "sojourn_request_e2e_seconds", width=12),
    )),
    Row("Latency by ledger account", (
        per_request("Ledger to the last byte, mean per request", "sojourn_request_ledger_seconds_total"),
        per_request("Ledger to the first text, mean per request", "sojourn_request_ttft_ledger_seconds_total"),
        quantiles("Time in the queue", "sojourn_request_queue_seconds"),
        quantiles("Interference by other requests' prompts", "sojourn_request_interference_seconds"),
        quantiles("Time until the scheduler sees a request", "sojourn_request_admission_seconds"),
        quantiles("Wait for a remote prefill", "sojourn_request_remote_prefill_seconds"),
        quantiles("Time from token to socket write", "sojourn_request_stream_seconds"),
        rates("Waiting in the core, by reason", "sojourn_request_wait_seconds_total", by="reason",
              shape="stack", unit=SUMMED,
              note="Seconds of waiting per second, over all ended requests: 1 s/s is one request that always waits."),
        rates("Refused by the scheduler, by reason", "sojourn_request_refusals_total", by="reason"),
        rates("Rejected before admission, by reason", "sojourn_request_rejected_total", by="reason"),
    )),
    Row("Admission: keys, limits, moderation", (
        rates("Calls over a tenant's limit, by reason", "sojourn_request_limited_total", by="reason"),
        quantiles("Wait for a tenant's limits", "sojourn_request_quota_seconds"),
        rates("Authentication failures", "sojourn_request_unauthorized_total", by="reason"),
        rates("Flagged by moderation, by category", "sojourn_request_moderation_flagged_total", by="category"),
        rates("Moderation checks without a verdict", "sojourn_request_moderation_failed_total", by="check"),
        rates("Reloads of the access files, by result", "sojourn_request_access_reloads_total", by="result"),
        rates("Failures of the rate-limit storage", "sojourn_request_limit_storage_failures_total"),
        gauges("Connections", "sojourn_request_connections"),
        rates("Connections that the server closed, by reason", "sojourn_request_closed_connections_total", by="reason"),
    )),
    Row("Objectives and workload", (
        share("Objectives met, by class", rate(_OBJECTIVE, by="klass, objective", where='outcome="met"'),
              rate(_OBJECTIVE, by="klass, objective"), "{{klass}} {{objective}}"),
        quantiles("Prompt length", "sojourn_request_prompt_length_tokens"),
        quantiles("Output length", "sojourn_request_output_length_tokens"),
    )),
    Row("Tenants and their price", (
        Panel("Requests, by tenant", "reqps", (Query(rate(_BY_TENANT, by="tenant"), "{{tenant}}"),), shape="stack",
              note="All ended requests."),
        share("Attainment, by tenant", rate(_BY_TENANT, by="tenant", where='outcome="met"'),
              f"({rate(_BY_TENANT, by='tenant', where=_JUDGED)} > 0)", "{{tenant}}",
              note="Share of a tenant's judged requests that met every objective of their class."),
        Panel("Price per hour, by tenant", "suffix: per hour", (
            Query(f"3600 * {rate(_PRICE, by='tenant, currency, basis')}", "{{tenant}}, {{currency}} by {{basis}}"),)),
    )),
    Row("Telemetry health", (
        share("Requests whose ledger does not close", rate("sojourn_request_unclosed_total"),
              rate("sojourn_request_finished_total"), "unclosed", width=6),
        rates("Unaccounted time", "sojourn_request_unaccounted_seconds_total", width=6, unit=SUMMED,
              note="Seconds per second, over all requests."),
        rates("Records lost", "sojourn_telemetry_dropped_records_total", "sojourn_telemetry_failed_records_total",
              width=4),
        rates("Time to render /metrics", "sojourn_telemetry_render_seconds_total", width=4),
        Panel("Core restarts", "suffix: restarts", (Query(_RESTARTS, "restarts"),), shape="number", width=4,
              note="In the time range shown."),
        quantiles("Lag of the front's event loop", "sojourn_request_loop_lag_seconds", width=12),
        gauges("Silence of the core", "sojourn_telemetry_core_silence_seconds", operator="max", width=12),
        rates("Hangs of the core", "sojourn_telemetry_core_hangs_total", by="outcome", width=12),
        rates("Unreadable messages", "sojourn_telemetry_unreadable_messages_total", by="receiver", width=12),
        gauges("Telemetry level", "sojourn_telemetry_enabled_info", by="level", width=12),
        gauges("Version", "sojourn_telemetry_build_info", by="version, python", width=12),
        rates("Traces, by decision", "sojourn_telemetry_traces_total", by="decision", width=12),
        rates("Selected traces, by result", "sojourn_telemetry_trace_exports_total", by="outcome", width=12),
    )),
)  # fmt: skip

TOKEN = (
    Row("Tokens per step", (
        rates("Scheduled tokens, by kind", "sojourn_token_scheduled_tokens_total", by="kind", shape="stack"),
        share("Fill of the token budget", rate("sojourn_token_scheduled_tokens_total"),
              rate("sojourn_token_budget_tokens_total"), "scheduled / budget"),
        quantiles("Step size in tokens", "sojourn_token_step_tokens"),
        rates("Padding and overrun", "sojourn_token_padding_tokens_total", "sojourn_token_overrun_tokens_total",
              width=12),
        rates("Speculation", "sojourn_token_drafted_tokens_total", "sojourn_token_accepted_tokens_total", width=12),
    )),
    Row("Speculative decoding", (
        share("Acceptance, by position",
              rate("sojourn_token_draft_position_tokens_total", where='result="accepted"', by="position"),
              rate("sojourn_token_draft_position_tokens_total", where='result="drafted"', by="position"),
              "{{position}}", note="Accepted with all before it, of those drafted at that position."),
        rates("Requests without drafts, by reason", "sojourn_token_undrafted_total", by="reason", shape="stack"),
    )),
    Row("Sampling", (
        quantiles("Entropy of the sampling distribution", "sojourn_token_entropy_nats"),
        quantiles("Probability mass kept by top-k and top-p", "sojourn_token_nucleus_mass_ratio"),
        rates("Rows of logits", "sojourn_token_logit_rows_total"),
    )),
    Row("Tokens of ended requests", (
        rates("Prompt, computed and generated tokens", "sojourn_token_prompt_tokens_total",
              "sojourn_token_computed_tokens_total", "sojourn_token_generated_tokens_total", width=8),
        rates("Token goodput, by class", "sojourn_token_good_tokens_total", by="klass", shape="stack",
              note="Tokens of requests that met every objective."),
        Panel("Characters per token", "suffix: characters", (
            Query(rate("sojourn_token_prompt_characters_total") + " / " + rate("sojourn_token_prompt_tokens_total"),
                  "prompt"),
            Query(rate("sojourn_token_output_characters_total") + " / " + rate("sojourn_token_generated_tokens_total"),
                  "output")), note="Too low where prompts are sent as ids."),
    )),
    Row("Tokenisation and sampling time per request", (
        quantiles("Encode", "sojourn_token_encode_seconds"),
        quantiles("Sample", "sojourn_token_sample_seconds"),
        quantiles("Decode", "sojourn_token_decode_seconds"),
    )),
)  # fmt: skip

COMPUTE = (
    Row("Steps", (
        quantiles("Step time, by composition", "sojourn_compute_step_seconds", by="composition", width=12),
        heatmap("Step time: where the steps lie", "sojourn_compute_step_seconds", width=12),
        rates("Host time, by stage", "sojourn_compute_stage_seconds_total", by="stage", shape="stack", width=12,
              note="Share of wall time, summed over instances. The rest to 100% lies between steps."),
        rates("Steps, by graph", "sojourn_compute_steps_total", by="graph", shape="stack", width=12),
    )),
    Row("Device", (
        Panel("Device busy", "percentunit",
              (Query(rate("sojourn_compute_device_seconds_total", operator="avg"), "busy"),
               Query(rate("sojourn_compute_device_gap_seconds_total", operator="avg"), "idle between steps")), width=6,
              note="Share of wall time, mean over instances. The rest is a loop without work."),
        rates("Floating-point operations", "sojourn_compute_flops_total", width=6, note="Over wall time."),
        rates("Memory traffic, lower bound", "sojourn_compute_moved_bytes_total", width=6, note="Over wall time."),
        rates("Time spent on drafts", "sojourn_compute_draft_seconds_total",
              "sojourn_compute_rejected_seconds_total", width=6, unit=SUMMED,
              note="Seconds per second: of the proposer, and of requests that waited for rejected drafts."),
        rates("Floating-point operations of the proposer", "sojourn_compute_draft_flops_total", width=6),
        rates("Memory traffic of the proposer, lower bound", "sojourn_compute_draft_moved_bytes_total", width=6),
        share("Arithmetic intensity", rate("sojourn_compute_flops_total"), rate("sojourn_compute_moved_bytes_total"),
              "intensity", unit="suffix: flop/B", width=6,
              note="Left of the roofline's ridge the bandwidth is the limit, right of it the arithmetic."),
    )),
    Row("Roofline", (
        Panel("Compute throughput while busy, by composition", "flops", (
            Query(rate("sojourn_compute_phase_flops_total", by="composition") + " / "
                  + rate("sojourn_compute_phase_device_seconds_total", by="composition"), "{{composition}}"),
            Query(gauge("sojourn_compute_ceiling_flops_per_second", by="precision", operator="max"),
                  "limit, {{precision}}"))),
        Panel("Memory bandwidth while busy, by composition", "Bps", (
            Query(rate("sojourn_compute_phase_moved_bytes_total", by="composition") + " / "
                  + rate("sojourn_compute_phase_device_seconds_total", by="composition"), "{{composition}}"),
            Query(gauge("sojourn_compute_ceiling_bytes_per_second", operator="max"), "limit"))),
        share("Roofline utilisation, by composition",
              rate("sojourn_compute_roofline_seconds_total", by="composition"),
              rate("sojourn_compute_phase_device_seconds_total", by="composition"), "{{composition}}",
              note="100% is a step that could not be faster; the rest is what kernels could still gain."),
        rates("FLOPs by part of the model", "sojourn_compute_part_flops_total", by="part", shape="stack"),
    )),
    Row("Parallel group", (
        rates("Time in exchanges, by collective", "sojourn_compute_exchange_seconds_total", by="collective",
              shape="stack", note="Share of wall time, of rank 0. `recv` waits for pipeline stages."),
        rates("Exchange time overlapped with computation, by collective",
              "sojourn_compute_exchange_hidden_seconds_total", by="collective", shape="stack",
              note="Share of wall time, of rank 0. Only what pipeline stages send each other can be hidden."),
        rates("Bytes exchanged, by collective", "sojourn_compute_exchanged_bytes_total", by="collective"),
        rates("Rank time, by activity", "sojourn_compute_rank_seconds_total", by="activity", shape="stack", unit=SUMMED,
              note="Seconds per second, summed over ranks: computing, exchanging, waiting for another stage."),
    )),
    Row("Mixture of experts", (
        rates("Tokens by expert", "sojourn_compute_expert_tokens_total", by="expert", shape="stack",
              note="A sample of the steps, all layers together."),
        quantiles("Expert imbalance: maximum over mean", "sojourn_compute_expert_imbalance_ratio"),
    )),
    Row("Start-up", (
        gauges("Last start, by phase", "sojourn_compute_startup_seconds", by="phase", shape="stack", operator="max",
               width=12, note="Start-up time, until ready. The phases sum to the whole."),
        gauges("Weights read, by tier", "sojourn_compute_startup_read_bytes", by="tier", shape="stack", operator="max",
               width=6),
        gauges("Start-up time saved by a spare process", "sojourn_compute_startup_spared_seconds", operator="max",
               width=6),
    )),
    Row("Weight error", (
        gauges("KL divergence from the reference, per token", "sojourn_compute_weight_error_nats", operator="max",
               width=12, note="Measured at the start with weights_reference."),
        gauges("Greedy agreement with the reference", "sojourn_compute_weight_greedy_agreement_ratio", operator="min",
               width=12),
    )),
    Row("Step time against its prediction", (
        quantiles("Measured / predicted", "sojourn_compute_prediction_ratio"),
        rates("Predicted device time", "sojourn_compute_predicted_seconds_total"),
        rates("Residual, slower and faster", "sojourn_compute_residual_seconds_total", by="direction"),
    )),
    Row("The machine", (
        rates("CPU time, by process", "sojourn_compute_cpu_seconds_total", by="process",
              note="100% is one core all the time."),
        gauges("Power", "sojourn_compute_power_watts", by="device"),
        Panel("Energy per step", "joule", (Query(
            rate("sojourn_compute_energy_joules_total", by="device") + " / ignoring (device) group_left () "
            + rate("sojourn_compute_steps_total"), "{{device}}"),)),
        gauges("GPU clocks", "sojourn_compute_sm_clock_hertz", "sojourn_compute_memory_clock_hertz", operator="min"),
        gauges("GPU clock throttled, by reason", "sojourn_compute_throttle_active", by="reason", operator="max"),
        gauges("GPU temperature", "sojourn_compute_temperature_celsius", operator="max"),
        gauges("GPU utilisation", "sojourn_compute_utilisation_ratio", operator="avg"),
        gauges("CPU steal", "sojourn_compute_steal_ratio", operator="max"),
        rates("Kernels of profile bursts, by class", "sojourn_compute_kernel_seconds_total", by="klass", shape="stack",
              note="Only after POST /debug/profile: read shares, not totals."),
    )),
)  # fmt: skip

MEMORY = (
    Row("KV block pool", (
        gauges("KV blocks, by state", "sojourn_memory_kv_blocks", by="state", shape="stack", width=12),
        Panel("KV cache in use", "percentunit",
              (Query(gauge("sojourn_memory_kv_usage_ratio", operator="max"), "fullest"),),
              width=12, note="The fullest of the instances."),
        gauges("Token slots of used blocks", "sojourn_memory_slots", by="state", width=12),
        rates("Evicted blocks", "sojourn_memory_evicted_blocks_total", width=12),
        quantiles("Wait for KV blocks", "sojourn_memory_blocked_seconds", width=12),
    )),
    Row("Prefix cache", (
        Panel("Prefix hit rate, and without eviction", "percentunit", (
            Query(rate(_LOOKUPS, where='result="hit"') + " / " + rate(_LOOKUPS), "hit"),
            Query(rate("sojourn_memory_infinite_hit_tokens_total") + " / " + rate(_LOOKUPS), "without eviction"))),
        rates("Prefix lookups in tokens, by outcome", _OUTCOMES, by="outcome", shape="stack"),
        Panel("Prefix hit rate by pool size", "percentunit", (Query(
            rate("sojourn_memory_resized_hit_tokens_total", by="pool") + " / ignoring (pool) group_left () "
            + rate(_LOOKUPS), "× {{pool}}"),), note="Multiples of the current pool."),
        quantiles("Time from eviction to miss of a prefix", "sojourn_memory_evicted_ago_seconds"),
        quantiles("Reuse interval of a cached block", "sojourn_memory_reuse_gap_seconds"),
        quantiles("Reuse distance", "sojourn_memory_reuse_distance_blocks"),
        quantiles("Age of a block at its eviction", "sojourn_memory_eviction_age_seconds"),
        quantiles("Idle time of a block at its eviction", "sojourn_memory_eviction_idle_seconds"),
        rates("Shadow index evictions", "sojourn_memory_shadow_evicted_blocks_total"),
    )),
    Row("LoRA adapters", (
        gauges("Slots in use", "sojourn_memory_adapter_slots_in_use"),
        rates("Adapter loads into a slot", "sojourn_memory_adapter_loads_total"),
        rates("Adapter evictions from a slot", "sojourn_memory_adapter_evictions_total"),
        quantiles("Adapter load time into host memory", "sojourn_memory_adapter_load_seconds"),
    )),
    Row("KV between servers", (
        quantiles("Wait for a KV transfer", "sojourn_memory_transfer_seconds"),
        rates("Leases that ended", "sojourn_memory_leases_ended_total", by="end"),
    )),
    Row("KV tiers: host memory and disk", (
        rates("KV read from a tier", "sojourn_memory_tier_loaded_bytes_total", by="tier"),
        rates("KV written to a tier", "sojourn_memory_tier_stored_bytes_total", by="tier"),
        gauges("Blocks in a tier", "sojourn_memory_tier_blocks", by="tier"),
        rates("Read time, by tier", "sojourn_memory_tier_load_seconds_total", by="tier"),
        rates("Write time, by tier", "sojourn_memory_tier_store_seconds_total", by="tier"),
        rates("Failed reads and writes, by tier", "sojourn_memory_tier_failures_total", by="tier"),
        rates("Blocks refused by a full tier", "sojourn_memory_tier_refused_blocks_total", by="tier"),
    )),
    Row("Preemptions and recomputation", (
        rates("Preemptions", "sojourn_memory_preemptions_total"),
        rates("Recomputed tokens", "sojourn_memory_recomputed_tokens_total"),
        rates("Discarded KV positions, by cause", "sojourn_memory_preempted_tokens_total", by="cause"),
        quantiles("Time from preemption to resumption", "sojourn_memory_preempted_seconds"),
    )),
    Row("The machine's memory", (
        gauges("Memory of the processes", "sojourn_memory_resident_bytes", by="process", width=12),
        gauges("Memory plan of the core", "sojourn_memory_planned_bytes", by="purpose", shape="stack", width=12),
        gauges("Memory of the GPU in use", "sojourn_memory_device_used_bytes", width=12),
    )),
)  # fmt: skip

DASHBOARDS: dict[str, tuple[Row, ...]] = {"token": TOKEN, "compute": COMPUTE, "memory": MEMORY, "request": REQUEST}
