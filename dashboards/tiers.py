"""Two tiers for every engine: are users affected and which resource is full, then the same server by lifecycle.

All panels use the neutral names, so they fill from our engine, vLLM and SGLang. A panel stays empty for an engine that
does not export its figure; `docs/foreign-servers.md` says which those are.
"""

from sojourn.dashboards.content import Row
from sojourn.dashboards.events import FIRING, FOUND
from sojourn.dashboards.neutral import PRESENT, SPAN_REQUESTS, SPAN_SECONDS
from sojourn.dashboards.rules_of_ours import BUDGET, BURN_RATE, BURN_WINDOWS
from sojourn.dashboards.views import Panel, Query, by_server, gauge, increase, rate

DRILLDOWN = "sojourn-drilldown"
_EACH = "{{instance}} ({{engine}})"
_SERVER = "engine, instance"
_GOOD = 'objective="all_objectives"'
_PRICE = "sojourn_request_price_total"
_JUDGED = "sojourn_request_objective_total"
_LOOKUPS = "llm:memory_prefix_tokens_total"
_ENDED = "llm:request_finished_total"


def _one(title: str, unit: str, expr: str, legend: str = _EACH, **options) -> Panel:
    return Panel(title, unit, (Query(expr, legend),), **options)


def _of_servers(name: str, operator: str = "sum") -> str:
    return gauge(name, by=_SERVER, operator=operator)


def _rates(name: str, where: str = "") -> str:
    return rate(name, by=_SERVER, where=where)


def _part(part: str, whole: str) -> str:
    return f"{part} / ({whole} > 0)"


_MISSED = increase(_JUDGED, by="model_name", where=f'{_GOOD},outcome="missed"')
_BURNS = tuple(
    Query(f'{BURN_RATE.format(window=window)}{{model_name=~"$model_name"}}', f"{{{{model_name}}}}, over {window}")
    for window in BURN_WINDOWS
)

SATURATION = (
    Row("Objectives: alerts, error budget, goodput", (
        Panel("Firing alerts and findings", "suffix: firing", (
            Query(f"max by (alertname, severity) ({FIRING})", "{{alertname}} ({{severity}})"),
            Query(f"max by (title, object) ({FOUND})", "{{title}}: {{object}}"),
        ), shape="states", width=12, is_derived=True,
              note="Alerts of rules.yaml, and causes that `sojourn watch --metrics-port` names, over time. The page "
                   "alerts.md of the documentation has what each alert means."),
        _one("Error budget left", "percentunit",
             f"1 - ({_MISSED} / {increase(_JUDGED, by='model_name', where=_GOOD)}) / scalar({BUDGET})",
             "{{model_name}}",
             shape="number", width=4, is_derived=True, opens="sojourn-request",
             note="Of the time range shown, as if it were the period of the SLO: 1 minus the share of requests that "
                  "missed an objective over the share that may miss. Below 0 the budget is spent. Choose 30 days for "
                  "the usual period. Only Sojourn counts objectives."),
        Panel("Error budget burn rate", "suffix: × budget", _BURNS, width=8, limits=(6.0, 14.4), is_derived=True,
              opens="sojourn-request",
              note="Share of requests that miss an objective over the share that may miss, by window. 1 spends the "
                   "budget in exactly its period. Above 6 over 6 h or 14.4 over 1 h an alert fires. Of all classes."),
        _one("Goodput, requests", "reqps", rate(_JUDGED, by="instance", where=f'{_GOOD},outcome="met"'),
             "{{instance}}", shape="stack", width=8, opens="sojourn-request",
             note="Requests per second that met every objective. Only Sojourn counts it."),
        _one("Goodput, tokens", "suffix: tokens/s", rate("sojourn_token_good_tokens_total", by="instance"),
             "{{instance}}", shape="stack", width=8, opens="sojourn-token"),
        _one("Price per hour", "suffix: per hour", f"3600 * {rate(_PRICE, by='currency, basis')}",
             "{{currency}} by {{basis}}", width=8, opens="sojourn-request"),
    )),
    Row("Are users affected?", (
        _one("Attainment, by server", "percentunit",
             _part(rate(_JUDGED, by="instance", where=f'{_GOOD},outcome="met"'),
                   rate(_JUDGED, by="instance", where=_GOOD)),
             "{{instance}}", width=6, opens="sojourn-request",
             note="Share of the ended requests that met every objective. Only Sojourn counts it."),
        by_server("Time to first token, p90", "llm:request_ttft_seconds", 0.9, "ttft_ms", width=6, opens=DRILLDOWN),
        by_server("Time per output token, p90", "llm:request_tpot_seconds", 0.9, "tpot_ms", width=6, opens=DRILLDOWN),
        by_server("End to end, p90", "llm:request_e2e_seconds", 0.9, "e2e_ms", width=6, opens=DRILLDOWN),
        Panel("Failed and refused, by server", "reqps", (
            Query(_rates(_ENDED, 'outcome=~"error|abort"'), f"{_EACH} failed or aborted"),
            Query(_rates("llm:request_rejected_total"), f"{_EACH} refused"),
        ), width=12, opens="sojourn-request", note="SGLang exports no outcome. An abort is the client's doing."),
        _one("Age of the oldest request without a token", "s",
             gauge("sojourn_request_oldest_wait_seconds", by="instance", operator="max"), "{{instance}}", width=12,
             limits=(5, 30), opens="sojourn-request", note="Shows a hang, in which latencies stay flat."),
    )),
    Row("Which resource is full?", (
        _one("KV cache in use", "percentunit", _of_servers("llm:memory_kv_usage_ratio", "max"), limits=(0.9, 0.95),
             opens=DRILLDOWN),
        _one("Requests waiting", "suffix: requests", _of_servers("llm:request_waiting"), limits=(1, 10),
             opens=DRILLDOWN, note="Beside a KV cache that is not full, the batch cap or the token budget holds them."),
        _one("Requests running", "suffix: requests", _of_servers("llm:request_running"), opens=DRILLDOWN),
        _one("Preemptions", "reqps", _rates("llm:memory_preemptions_total"), limits=(0.1, 1), opens=DRILLDOWN),
        _one("Prefix hit rate", "percentunit", _part(_rates(_LOOKUPS, 'result="hit"'), _rates(_LOOKUPS)),
             opens="sojourn-memory"),
        _one("Device busy", "percentunit", _rates("llm:compute_device_seconds_total"), limits=(0.9, 1),
             opens="sojourn-compute", note="Share of wall time. vLLM does not export it."),
    )),
    Row("Servers and throughput", (
        _one("Servers up", "suffix: servers", f"count by (engine) ({_of_servers(PRESENT)})", "{{engine}}",
             shape="number", width=4, is_derived=True,
             note="Servers whose metrics Prometheus scrapes now, by engine."),
        _one("Requests ended", "reqps", _rates(_ENDED), shape="stack", width=10),
        _one("Tokens generated", "suffix: tokens/s", _rates("llm:token_generated_tokens_total"), shape="stack",
             width=10),
    )),
)  # fmt: skip

_SPAN = "span, engine"
DRILL = (
    Row("Request: where does the time go?", (
        _one("Mean time of a request, by part", "s",
             f"({_part(rate(SPAN_SECONDS, by=_SPAN), rate(SPAN_REQUESTS, by=_SPAN))}) > 0.00001",
             "{{span}} ({{engine}})", shape="stack", width=12,
             note="For Sojourn: the accounts of the ledger. For other engines: the intervals that they measure."),
        by_server("Time in the queue, p90", "llm:request_queue_seconds", 0.9, width=12,
                  note="Other engines include waits for KV blocks."),
        by_server("Time to first token, p50", "llm:request_ttft_seconds", 0.5, "ttft_ms"),
        by_server("Time to first token, p99", "llm:request_ttft_seconds", 0.99, "ttft_ms"),
        by_server("End to end, p99", "llm:request_e2e_seconds", 0.99, "e2e_ms"),
    )),
    Row("Token: lengths and rates", (
        by_server("Prompt length, p90", "llm:request_prompt_length_tokens", 0.9),
        by_server("Output length, p90", "llm:request_output_length_tokens", 0.9),
        _one("Prompt tokens", "suffix: tokens/s", _rates("llm:token_prompt_tokens_total"), shape="stack"),
        by_server("Inter-token latency, p50", "llm:request_itl_seconds", 0.5),
        by_server("Inter-token latency, p99", "llm:request_itl_seconds", 0.99),
        _one("Draft acceptance rate", "percentunit",
             _part(_rates("llm:token_accepted_tokens_total"), _rates("llm:token_drafted_tokens_total")),
             note="Of speculative decoding; empty without it."),
    )),
    Row("Compute: is the device the limit?", (
        _one("Batch: requests running", "suffix: requests", _of_servers("llm:request_running"), width=12,
             opens="sojourn-compute", note="A flat top is the batch cap."),
        _one("Device utilisation", "percentunit", _rates("llm:compute_device_seconds_total"), limits=(0.9, 1),
             width=12, opens="sojourn-compute"),
    )),
    Row("Memory: is the KV cache the limit?", (
        _one("KV cache, fullest pool", "percentunit", _of_servers("llm:memory_kv_usage_ratio", "max"),
             limits=(0.9, 0.95), opens="sojourn-memory"),
        _one("Preemptions per ended request", "percentunit",
             _part(_rates("llm:memory_preemptions_total"), _rates(_ENDED)), limits=(0.1, 0.5), opens="sojourn-memory"),
        _one("Prefix hit rate of prompt tokens", "percentunit",
             _part(_rates(_LOOKUPS, 'result="hit"'), _rates(_LOOKUPS)), opens="sojourn-memory"),
    )),
)  # fmt: skip
