"""Prometheus' recording and alerting rules, from the catalogue's names. Every alert says where to look next."""

from typing import Any

from dashboards.views import metrics_of
from metrics.catalog.catalog import GOOD

WINDOW = "5m"
RECORDED_QUANTILES = (0.5, 0.99)
RECORDED_HISTOGRAMS = (
    "sojourn_request_ttft_seconds",
    "sojourn_request_itl_seconds",
    "sojourn_request_tpot_seconds",
    "sojourn_request_e2e_seconds",
)


def _rate(selector: str) -> str:
    return f"sum by (model_name) (rate({selector}[{WINDOW}]))"


def _share(part: str, whole: str) -> str:
    return f"{_rate(part)} / {_rate(whole)}"


_OUTCOMES = "sojourn_memory_prefix_outcome_tokens_total"
_RESIDUAL = 'sojourn_compute_residual_seconds_total{direction="%s"}'
_TOKENS = f"sum by (model_name, instance) (rate(sojourn_token_scheduled_tokens_total[{WINDOW}]))"
RATIOS = {
    "model_name:sojourn_request_goodput:ratio_rate5m": _share(
        f'sojourn_request_objective_total{{objective="{GOOD}",outcome="met"}}',
        f'sojourn_request_objective_total{{objective="{GOOD}"}}',
    ),
    "model_name:sojourn_request_unclosed:ratio_rate5m": _share(
        "sojourn_request_unclosed_total", "sojourn_request_finished_total"
    ),
    "model_name:sojourn_memory_prefix_hit:ratio_rate5m": _share(
        'sojourn_memory_prefix_tokens_total{result="hit"}', "sojourn_memory_prefix_tokens_total"
    ),
    # Net of the steps that were faster than predicted: noise cancels out, and slowness remains.
    "model_name:sojourn_compute_residual:ratio_rate5m": (
        f"({_rate(_RESIDUAL % 'slower')} - {_rate(_RESIDUAL % 'faster')}) / "
        + _rate("sojourn_compute_predicted_seconds_total")
    ),
    "model_name:sojourn_compute_device_busy:ratio_rate5m": (
        f"avg by (model_name) (rate(sojourn_compute_device_seconds_total[{WINDOW}]))"
    ),
    # Of several servers of one model: tokens that the busiest computed over the mean, and the hit rate of each.
    "model_name:sojourn_token_imbalance:ratio_rate5m": (
        f"max by (model_name) ({_TOKENS}) / avg by (model_name) ({_TOKENS})"
    ),
    "instance:sojourn_memory_prefix_hit:ratio_rate5m": (
        f'sum by (model_name, instance) (rate(sojourn_memory_prefix_tokens_total{{result="hit"}}[{WINDOW}])) / '
        f"sum by (model_name, instance) (rate(sojourn_memory_prefix_tokens_total[{WINDOW}]))"
    ),
}


def _alert(name: str, expr: str, wait: str, severity: str, summary: str, description: str) -> dict[str, Any]:
    return {
        "alert": name,
        "expr": expr,
        "for": wait,
        "labels": {"severity": severity},
        "annotations": {"summary": summary, "description": description},
    }


ALERTS = (
    _alert(
        "SojournDown", 'up{job="sojourn"} == 0', "1m", "critical",
        "{{ $labels.instance }} does not answer",
        "The scrape fails: the front process is gone, or the address is wrong.",
    ),
    _alert(
        "SojournCoreRestarted", "increase(sojourn_telemetry_core_restarts_total[10m]) > 0", "0m", "critical",
        "The core of {{ $labels.model_name }} died and was started again",
        "Open streams ended with an error. The log of {{ $labels.instance }} names the cause.",
    ),
    _alert(
        "SojournGoodputLow", "model_name:sojourn_request_goodput:ratio_rate5m < 0.9", "5m", "warning",
        "Only {{ $value | humanizePercentage }} of the requests of {{ $labels.model_name }} meet their objectives",
        "Dashboard sojourn-request: the ledger names the account that grew; its colour is the lifecycle to open next.",
    ),
    _alert(
        "SojournRejecting",
        f"{_rate('sojourn_request_rejected_total')} / "
        f"({_rate('sojourn_request_rejected_total')} + {_rate('sojourn_request_finished_total')}) > 0.05",
        "5m", "warning",
        "{{ $labels.model_name }} refuses {{ $value | humanizePercentage }} of its requests",
        "Dashboard sojourn-request, panel `Rejected before admission`: a full queue means more load than capacity.",
    ),
    _alert(
        "SojournBlockedByMemory",
        "max by (model_name) (sojourn_memory_kv_usage_ratio) > 0.95 and "
        + _rate('sojourn_request_refusals_total{reason="kv_blocks"}') + " > 0",
        "5m", "warning",
        "Requests of {{ $labels.model_name }} wait for KV blocks",
        "Dashboard sojourn-memory: a larger pool, shorter outputs or more prefix hits would help, a larger batch not.",
    ),
    _alert(
        "SojournPreempting",
        _share("sojourn_memory_preemptions_total", "sojourn_request_finished_total") + " > 0.1",
        "5m", "warning",
        "{{ $value | humanizePercentage }} preemptions for each request of {{ $labels.model_name }}",
        "Dashboard sojourn-memory, row `Preemption and its price`: tokens computed twice. Admit fewer, or add blocks.",
    ),
    _alert(
        "SojournEvictedMisses",
        _share(f'{_OUTCOMES}{{outcome="miss_evicted"}}', _OUTCOMES) + " > 0.2",
        "10m", "warning",
        "{{ $labels.model_name }} computes {{ $value | humanizePercentage }} of its prompt tokens again: evicted",
        "Dashboard sojourn-memory, row `The prefix cache`: which size of the pool would have had them.",
    ),
    _alert(
        "SojournRecomputing",
        _share('sojourn_token_scheduled_tokens_total{kind="recompute"}', "sojourn_token_scheduled_tokens_total")
        + " > 0.1",
        "5m", "warning",
        "{{ $value | humanizePercentage }} of the tokens that {{ $labels.model_name }} computes rebuild lost KV",
        "Dashboard sojourn-memory, row `Preemption and its price`. Admit fewer, or add blocks.",
    ),
    _alert(
        "SojournTracesLost",
        'increase(sojourn_telemetry_trace_exports_total{outcome=~"dropped|refused"}[10m]) > 0', "5m", "warning",
        "{{ $labels.instance }} loses traces ({{ $labels.outcome }})",
        "The collector at `otlp_endpoint` is away, refuses, or is slower than requests end. No request waits for it.",
    ),
    _alert(
        "SojournStepsSlow", "model_name:sojourn_compute_residual:ratio_rate5m > 0.2", "10m", "warning",
        "Steps of {{ $labels.model_name }} take {{ $value | humanizePercentage }} longer than predicted",
        "Dashboard sojourn-compute: look for lower clocks, CPU steal, other work on the device, or another kernel.",
    ),
    _alert(
        "SojournCpuStolen", "max by (model_name) (avg_over_time(sojourn_compute_steal_ratio[5m])) > 0.05",
        "10m", "warning",
        "Other machines get {{ $value | humanizePercentage }} of the CPU time of {{ $labels.model_name }}",
        "Steps wait for their slowest thread, so they lose more than that. A host with fewer neighbours, or cores of "
        "its own, would help, a setting would not. Dashboard sojourn-compute, row `The machine`.",
    ),
    _alert(
        "SojournFleetUneven",
        "model_name:sojourn_token_imbalance:ratio_rate5m > 1.5 and on (model_name) "
        "max by (model_name) (sojourn_request_waiting) > 0 and on (model_name) "
        "min by (model_name) (sojourn_request_waiting) == 0",
        "10m", "warning",
        "One server of {{ $labels.model_name }} computes {{ $value | humanize }} times the mean, and requests wait",
        "Requests wait at a server while another has none waiting. Dashboard sojourn-fleet, row `How unequal the "
        "servers are`: choose a router policy that looks at load.",
    ),
    _alert(
        "SojournLedgerOpen", "model_name:sojourn_request_unclosed:ratio_rate5m > 0.01", "10m", "warning",
        "The ledger of {{ $value | humanizePercentage }} of the requests of {{ $labels.model_name }} does not close",
        "Time went somewhere that no account books: treat diagnoses of this server with care.",
    ),
    _alert(
        "SojournRecordsLost",
        "increase(sojourn_telemetry_dropped_records_total[10m]) "
        "+ increase(sojourn_telemetry_failed_records_total[10m]) > 0",
        "0m", "warning",
        "{{ $labels.instance }} loses records",
        "The tables of this run have gaps. The disk is full or slower than the records come.",
    ),
)  # fmt: skip


def rules() -> dict[str, Any]:
    """The rules file, as data."""
    quantiles = [
        {
            "record": f"model_name:{name}:p{100 * q:g}_rate{WINDOW}",
            "expr": f"histogram_quantile({q:g}, sum by (model_name, le) (rate({name}_bucket[{WINDOW}])))",
        }
        for name in RECORDED_HISTOGRAMS
        for q in RECORDED_QUANTILES
    ]
    ratios = [{"record": name, "expr": expr} for name, expr in RATIOS.items()]
    for rule in (*quantiles, *ratios):
        metrics_of(rule["expr"])  # raises KeyError for a name that the catalogue lacks
    return {
        "groups": [
            {"name": "sojourn-recording", "interval": "15s", "rules": [*quantiles, *ratios]},
            {"name": "sojourn-alerts", "interval": "15s", "rules": list(ALERTS)},
        ]
    }


def prometheus_rule() -> dict[str, Any]:
    """The same rules for the Prometheus operator. The label that it selects by is its own setting; `release` is that of
    its Helm chart."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "sojourn", "labels": {"release": "prometheus"}},
        "spec": rules(),
    }
