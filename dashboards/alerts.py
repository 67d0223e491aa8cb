"""Prometheus' alerts. Each says what hurts, where to look, and which page of the app and of the docs explains it.

No alert names a job: a target is one of ours when it gave `llm:request_running`, which the recording rules make of
every engine. An alert about latency burns an error budget, over two windows: the long one says that it matters, the
short one that it still goes on (Google's SRE Workbook, chapter 5).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sojourn.dashboards.neutral import PRESENT
from sojourn.dashboards.rules_of_ours import EVICTED_SHARE, MISSED, RECOMPUTED_SHARE, by_model, share
from sojourn.interop.sources.pressure import RUNNING
from sojourn.interop.sources.registry import SOURCES
from sojourn.interop.sources.source import Source
from sojourn.metrics.catalog.catalog import GOOD

PAGE, TICKET = "critical", "warning"
# Budget burnt at this multiple of the rate that would last 30 days → the long window, the short one, how loud.
BURNS = ((14.4, "1h", "5m", "2m", PAGE), (6.0, "6h", "30m", "15m", TICKET))
LOWEST_TARGET = 0.94  # below it, 14.4 times the budget is more than all requests
JUDGED_AT_LEAST = 20  # requests in the long window: two late ones out of three are no trend
STUCK_SECONDS = 30
_FOREIGN = 'engine!="sojourn"'
_EVERY = f'sojourn_request_objective_total{{objective="{GOOD}"}}'


@dataclass(frozen=True, slots=True)
class AlertOptions:
    """What the rules cannot know: the share of requests that should be good, and where pages are served.

    `objectives`: bounds in milliseconds by name (`ttft_ms`), for servers that export none themselves. `dashboard_url`
    ends with `?` or `&`, and `{board}` in it is the name of a dashboard. Raises ValueError.
    """

    target_share: float = 0.99
    objectives: Mapping[str, float] = field(default_factory=dict)
    app_url: str = "http://127.0.0.1:8501"
    dashboard_url: str = "http://127.0.0.1:3000/d/{board}?"
    docs_url: str = "docs"

    def __post_init__(self) -> None:
        if not LOWEST_TARGET <= self.target_share < 1:
            raise ValueError(
                f"the share of good requests is {self.target_share:g}; give one from {LOWEST_TARGET:g} to 0.9999"
            )


@dataclass(frozen=True, slots=True)
class Alert:
    name: str
    expr: str
    wait: str
    severity: str
    summary: str
    description: str
    board: str  # the dashboard to open
    symptom: str = ""  # key of a complaint: the app's page Symptoms opens at it
    labels: tuple[str, ...] = ("model_name",)  # of its series, which the dashboard is to show

    def rule(self, options: AlertOptions) -> dict[str, Any]:
        """As Prometheus reads it."""
        docs = f"{options.docs_url}/alerts.md#{self.name.lower()}"
        shown = "&".join(f"var-{label}={{{{ $labels.{label} }}}}" for label in self.labels)
        page = f"{options.app_url}/symptoms?symptom={self.symptom}" if self.symptom else docs
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.wait,
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook_url": page,
                "documentation": docs,
                "dashboard_url": options.dashboard_url.format(board=self.board) + shown,
            },
        }


def alerts(options: AlertOptions) -> list[dict[str, Any]]:
    """Every alert as a rule."""
    every = (*_of_targets(), *_burns(options), *_FOR_ALL, *_FOR_OURS)
    return [alert.rule(options) for alert in every]


def _of_targets() -> Iterator[Alert]:
    known = f"count by (job, instance) (present_over_time({PRESENT}[1d]))"
    yield Alert(
        "SojournTargetDown", f"up == 0 and on (job, instance) {known}", "1m", PAGE,
        "{{ $labels.instance }} does not answer",
        "The scrape fails: the process is gone, it hangs, or the network between is broken.",
        "sojourn-saturation", labels=("job", "instance"),
    )  # fmt: skip
    yield Alert(
        "SojournModelVanished",
        f"count by (job, model_name) (present_over_time({PRESENT}[1h])) unless on (job, model_name) {PRESENT}",
        "5m", PAGE,
        "No server of {{ $labels.model_name }} is left",
        "In the last hour a server of this model was scraped, and now Prometheus has none: all are gone, or its "
        "service discovery no longer finds them.",
        "sojourn-saturation", labels=("job", "model_name"),
    )  # fmt: skip
    yield Alert(
        "SojournNoServer", f"absent({PRESENT})", "5m", TICKET,
        "Prometheus has no server of any model",
        "No scrape gave a metric of a known server. SGLang and LMDeploy need --enable-metrics.",
        "sojourn-saturation", labels=(),
    )  # fmt: skip


def _burns(options: AlertOptions) -> Iterator[Alert]:
    budget = 1 - options.target_share
    for (factor, long, short, wait, severity), speed in zip(BURNS, ("Fast", "Slow"), strict=True):
        spent = factor * budget
        enough = f"{by_model('increase', _EVERY, long)} >= {JUDGED_AT_LEAST}"
        yield Alert(
            f"SojournGoodputBurns{speed}",
            f"{MISSED.format(window=long)} > {spent:g} and {MISSED.format(window=short)} > {spent:g} "
            f"and on (model_name) {enough}",
            wait, severity,
            "{{ $value | humanizePercentage }} of the requests of {{ $labels.model_name }} miss an objective",
            f"Over {long} and still over {short}: {factor:g} times the rate at which {budget:.2%} would be missed in "
            "30 days. The ledger names the account that grew; its colour is the lifecycle to open next.",
            "sojourn-request", "product_latency_poor",
        )  # fmt: skip
        for objective, bound_ms in options.objectives.items():
            noun = objective.removesuffix("_ms")
            late = [_late_quantile(noun, 1 - spent, window, bound_ms) for window in (long, short)]
            yield Alert(
                f"SojournForeign{noun.capitalize()}Burns{speed}", " and ".join(late), wait, severity,
                f"More than {spent:.1%} of the requests of {{{{ $labels.model_name }}}} at {{{{ $labels.instance }}}} "
                f"miss {noun} ≤ {bound_ms:g} ms",
                f"Over {long} and still over {short}, from the server's histogram, between whose bounds the quantile "
                "is estimated.",
                "sojourn-saturation", "high_ttft" if noun == "ttft" else "high_itl", ("model_name", "instance"),
            )  # fmt: skip


def _late_quantile(noun: str, quantile: float, window: str, bound_ms: float) -> str:
    """True where more than 1 - quantile of the requests are above the bound."""
    buckets = (
        f"sum by (job, instance, model_name, le) (rate(llm:request_{noun}_seconds_bucket{{{_FOREIGN}}}[{window}]))"
    )
    return f"histogram_quantile({quantile:.6g}, {buckets}) > {bound_ms / 1000:g}"


_REJECTED, _FINISHED = "llm:request_rejected_total", "llm:request_finished_total"
# From the names that every engine has.
_FOR_ALL: tuple[Alert, ...] = (
    Alert(
        "SojournRejecting",
        f"{by_model('rate', _REJECTED)} / ({by_model('rate', _REJECTED)} + {by_model('rate', _FINISHED)}) > 0.05",
        "5m", TICKET,
        "{{ $labels.model_name }} refuses {{ $value | humanizePercentage }} of its requests",
        "Panel `Failed and refused, by server`. A full queue means more load than capacity.",
        "sojourn-saturation", "high_ttft",
    ),
    Alert(
        "SojournPreempting", share("llm:memory_preemptions_total", _FINISHED) + " > 0.1", "5m", TICKET,
        "{{ $value | humanizePercentage }} preemptions for each request of {{ $labels.model_name }}",
        "Tokens are computed twice. Admit fewer requests, or add KV blocks.",
        "sojourn-drilldown", "vram_fills_quickly",
    ),
    Alert(
        "SojournKvFull",
        "max by (job, instance, model_name) (llm:memory_kv_usage_ratio) > 0.95 and on (job, instance, model_name) "
        "sum by (job, instance, model_name) (llm:request_waiting) > 0",
        "5m", TICKET,
        "Requests wait at {{ $labels.instance }}, and its KV pool is full",
        "A larger pool, shorter outputs or more prefix hits would help, a larger batch not. Our engine names the "
        "reason of a wait: dashboard sojourn-request, `Waiting in the core, by reason`.",
        "sojourn-drilldown", "vram_fills_quickly", ("model_name", "instance"),
    ),
)  # fmt: skip
_BY_SERVER = "job, instance, model_name"
_HELD = " or ".join(f"sum by ({_BY_SERVER}) (llm:request_{name}) > 0" for name in ("running", "waiting"))
_STILL = " and ".join(
    f"on ({_BY_SERVER}) (sum by ({_BY_SERVER}) (rate(llm:{name}[2m])) == 0)"
    for name in ("token_prompt_tokens_total", "token_generated_tokens_total", "request_itl_seconds_count")
)


def _one_engine_stuck(source: Source) -> str:
    """By the labels of the engines that share a server."""
    running = next(item.theirs[0][0].name for item in source.translations if item.ours == RUNNING)
    engine = f"{_BY_SERVER}, {source.engine_label}"
    several = f"count by ({_BY_SERVER}) (count by ({engine}) ({running})) > 1"
    still = " and ".join(
        f"on ({engine}) (sum by ({engine}) (rate({name}[2m])) == 0)" for name in source.engine_counters
    )
    return f"((sum by ({engine}) ({running}) > 0) and {still} and on ({_BY_SERVER}) ({several}))"


_FOR_ALL += (
    Alert(
        "SojournEngineStuck", f"({_HELD}) and {_STILL}", "30s", PAGE,
        "{{ $labels.instance }} has {{ $value }} requests, and gave no token for 2 minutes",
        "The engine hangs. Take a stack dump (`py-spy dump --pid PID`, also of its workers), then restart it.",
        "sojourn-saturation", "high_ttft", ("model_name", "instance"),
    ),
    Alert(
        "SojournOneEngineStuck", " or ".join(_one_engine_stuck(source) for source in SOURCES if source.engine_label),
        "30s", PAGE,
        "Engine {{ $labels.engine }}{{ $labels.dp_rank }} of {{ $labels.instance }} has {{ $value }} requests, and "
        "gave no token for 2 minutes",
        "One of several engines of this server hangs, and the others go on. Take a stack dump of its process "
        "(`py-spy dump --pid PID`, also of its workers), then restart it.",
        "sojourn-saturation", "high_ttft", ("model_name", "instance"),
    ),
)  # fmt: skip
# From names that only our engine has.
_FOR_OURS = (
    Alert(
        "SojournStuck",
        f"max by (job, instance, model_name) (sojourn_request_oldest_wait_seconds) > {STUCK_SECONDS} and "
        "on (job, instance, model_name) sum by (job, instance, model_name) "
        "(rate(sojourn_token_scheduled_tokens_total[2m])) == 0",
        "1m", PAGE,
        "{{ $labels.instance }} computed no token for 2 minutes, and a request waits {{ $value | humanizeDuration }}",
        "The core hangs or is away. Latencies are booked when requests end, so they stay flat meanwhile. The log of "
        "the server names the cause.",
        "sojourn-request", "high_ttft", ("model_name", "instance"),
    ),
    Alert(
        "SojournCoreRestarted", "increase(sojourn_telemetry_core_restarts_total[10m]) > 0", "0m", PAGE,
        "The core of {{ $labels.model_name }} died and was started again",
        "Open streams ended with an error. The log of {{ $labels.instance }} names the cause.",
        "sojourn-request", labels=("model_name", "instance"),
    ),
    Alert(
        "SojournBlockedByMemory",
        "max by (model_name) (sojourn_memory_kv_usage_ratio) > 0.95 and "
        + by_model("rate", 'sojourn_request_refusals_total{reason="kv_blocks"}') + " > 0",
        "5m", TICKET,
        "Requests of {{ $labels.model_name }} wait for KV blocks",
        "A larger pool, shorter outputs or more prefix hits would help, a larger batch not.",
        "sojourn-memory", "vram_fills_quickly",
    ),
    Alert(
        "SojournEvictedMisses", EVICTED_SHARE + " > 0.2", "10m", TICKET,
        "{{ $labels.model_name }} computes {{ $value | humanizePercentage }} of its prompt tokens again: evicted",
        "Row `Prefix cache`: which size of the pool would have had them.",
        "sojourn-memory", "vram_fills_quickly",
    ),
    Alert(
        "SojournRecomputing", RECOMPUTED_SHARE + " > 0.1", "5m", TICKET,
        "{{ $value | humanizePercentage }} of the tokens that {{ $labels.model_name }} computes rebuild lost KV",
        "Row `Preemptions and recomputation`. Admit fewer requests, or add blocks.",
        "sojourn-memory", "vram_fills_quickly",
    ),
    Alert(
        "SojournTracesLost",
        'increase(sojourn_telemetry_trace_exports_total{outcome=~"dropped|refused"}[10m]) > 0', "5m", TICKET,
        "{{ $labels.instance }} loses traces ({{ $labels.outcome }})",
        "The collector at `otlp_endpoint` is away, refuses, or is slower than requests end. No request waits for it.",
        "sojourn-request", labels=("model_name", "instance"),
    ),
    Alert(
        "SojournStepsSlow", "model_name:sojourn_compute_residual:ratio_rate5m > 0.2", "10m", TICKET,
        "Steps of {{ $labels.model_name }} take {{ $value | humanizePercentage }} longer than predicted",
        "Look for lower clocks, CPU steal, other work on the device, or another kernel.",
        "sojourn-compute", "high_itl",
    ),
    Alert(
        "SojournCpuStolen", "max by (model_name) (avg_over_time(sojourn_compute_steal_ratio[5m])) > 0.05",
        "10m", TICKET,
        "Other machines get {{ $value | humanizePercentage }} of the CPU time of {{ $labels.model_name }}",
        "Steps wait for their slowest thread, so they lose more than that. A host with fewer neighbours, or cores of "
        "its own, would help, a setting would not.",
        "sojourn-compute", "high_itl",
    ),
    Alert(
        "SojournFleetUneven",
        "model_name:sojourn_token_imbalance:ratio_rate5m > 1.5 and on (model_name) "
        "max by (model_name) (sojourn_request_waiting) > 0 and on (model_name) "
        "min by (model_name) (sojourn_request_waiting) == 0",
        "10m", TICKET,
        "One server of {{ $labels.model_name }} computes {{ $value | humanize }} times the mean, and requests wait",
        "Requests wait at a server while another has none waiting. Row `Load balance`: choose a router "
        "policy that looks at load.",
        "sojourn-fleet", "devices_do_not_help",
    ),
    Alert(
        "SojournLedgerOpen", "model_name:sojourn_request_unclosed:ratio_rate5m > 0.01", "10m", TICKET,
        "The ledger of {{ $value | humanizePercentage }} of the requests of {{ $labels.model_name }} does not close",
        "Time went somewhere that no account books: treat diagnoses of this server with care.",
        "sojourn-request",
    ),
    Alert(
        "SojournRecordsLost",
        "increase(sojourn_telemetry_dropped_records_total[10m]) "
        "+ increase(sojourn_telemetry_failed_records_total[10m]) > 0",
        "0m", TICKET,
        "{{ $labels.instance }} loses records",
        "The tables of this run have gaps. The disk is full or slower than the records come.",
        "sojourn-request", labels=("model_name", "instance"),
    ),
)  # fmt: skip
