"""The baseline: rules with fixed thresholds, as runbooks and dashboards of this field use them.

They read what the diagnosis reads at the level `metrics`: the client's records and the server's /metrics. Each rule is
one line of a runbook: a figure, its bound, and the cause that the runbook names. They are tried from the top, as a
reader goes through a runbook, and each rule that fires is a finding.

The thresholds are those of alerts in vLLM's production stack and in llm-d's playbooks: KV use of 90%, waiting
requests, preemptions, p95 latencies against their objectives. Others are of Red Hat's triage of vLLM latency (2026),
and of common error budgets.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pandas as pd

from sojourn.diagnosis.causes import CAUSES
from sojourn.diagnosis.score.said import Said, SaidCause
from sojourn.diagnosis.verdict import evidence
from sojourn.interop.sources.pressure import WAITING
from sojourn.interop.sources.view import ServerView, observe
from sojourn.metrics.request.goodput import judged, measured
from sojourn.metrics.request.objectives import objectives_of
from sojourn.metrics.run.directory import RunDirectory

BASELINE = "thresholds"  # its name among the levels
KV_ALMOST_FULL = 0.90
MANY_WAITING = 5.0  # requests, on average over the scrapes
LOW_HIT_RATE = 0.20  # of the looked-up prompt tokens
ERROR_BUDGET = 0.01  # of the requests
LATE_SENDS_MS = 100.0  # p95 of the load generator's own lateness
TAIL = 0.95


@dataclass(frozen=True, slots=True)
class Signals:
    """What the rules read. `view` is None where nothing was scraped."""

    rows: pd.DataFrame
    view: ServerView | None
    worst: dict[str, float]  # objective → p95 of the latency over its bound, of the class where it is largest

    def gauge(self, name: str) -> float:
        """The mean of a gauge; 0 where the server lacks it."""
        gauge = self.view.gauges.get(name) if self.view is not None else None
        return gauge.mean if gauge is not None else 0.0


@dataclass(frozen=True, slots=True)
class Rule:
    key: str  # of a cause
    words: str
    value: Callable[[Signals], float]
    bound: float


def _errors(pattern: str) -> Callable[[Signals], float]:
    def share(signals: Signals) -> float:
        lost = signals.rows[signals.rows.status != "ok"]
        ended = lost.error.fillna(lost.status).astype(str)
        return float(ended.str.contains(pattern, case=False).sum()) / max(len(signals.rows), 1)

    return share


def _p95_lag_ms(signals: Signals) -> float:
    lag = (signals.rows.sent_ns.astype("float64") - signals.rows.due_ns.astype("float64")).dropna() / 1e6
    return float(lag.quantile(TAIL)) if len(lag) else 0.0


def _kv_use(signals: Signals) -> float:
    view = signals.view
    return (view.kv_largest or 0.0) if view is not None else 0.0


def _preemptions(signals: Signals) -> float:
    return (signals.view.preemptions or 0.0) if signals.view is not None else 0.0


def _missed_prefixes(signals: Signals) -> float:
    """The share of looked-up tokens that missed, while the first token is late; 0 where the server does not tell."""
    rate = signals.view.hit_rate if signals.view is not None else None
    return 1.0 - rate if rate is not None and signals.worst.get("ttft_ms", 0.0) > 1.0 else 0.0


def _over(objective: str) -> Callable[[Signals], float]:
    return lambda signals: signals.worst.get(objective, 0.0)


RULES = (
    Rule("starved_load_generator", "the load generator sends late (p95, ms)", _p95_lag_ms, LATE_SENDS_MS),
    Rule("core_death", "requests end with errors of the server", _errors("5[0-9][0-9]|reset|core"), ERROR_BUDGET),
    Rule("queue_limit", "requests are refused (429)", _errors("429"), ERROR_BUDGET),
    Rule("kv_pool", "requests are preempted", _preemptions, 0.0),
    Rule("kv_pool", "the KV cache is almost full", _kv_use, KV_ALMOST_FULL),
    Rule("overload", "requests wait", lambda signals: signals.gauge(WAITING), MANY_WAITING),
    Rule("prefix_cache_off", "the prefix cache misses, and first tokens are late", _missed_prefixes,
         1.0 - LOW_HIT_RATE),
    Rule("own_prefill", "the p95 of the time to first token is above its objective", _over("ttft_ms"), 1.0),
    Rule("batch_too_large", "the p95 of the time per output token is above its objective", _over("tpot_ms"), 1.0),
    Rule("long_outputs", "the p95 of the end-to-end latency is above its objective", _over("e2e_ms"), 1.0),
)  # fmt: skip


def threshold_verdict(run: RunDirectory) -> Said:
    """The verdict of the baseline. Raises RunDataError."""
    began = time.perf_counter()
    signals = read_signals(run)
    causes = list(_fire(signals))
    good = float(signals.rows.good.mean()) if len(signals.rows) else 0.0
    first = causes[0].statement if causes else "no threshold is crossed"
    state = "healthy" if not causes else "overloaded" if causes[0].key == "overload" else "degraded"
    return Said(state=state, headline=f"{first}; {good:.0%} of the requests are good", causes=causes,
                seconds=time.perf_counter() - began)  # fmt: skip


def read_signals(run: RunDirectory) -> Signals:
    """From the client's records and the scrapes alone."""
    meta = run.meta()
    requests = run.requests()
    objectives = meta.get("objectives") or []
    rows = judged(measured(requests, meta), objectives)
    worst: dict[str, float] = {}
    for klass, group in rows.groupby("klass"):
        for name, bound in objectives_of(str(klass), objectives).items():
            latency = group[name].astype("float64").dropna()
            if len(latency):
                worst[name] = max(worst.get(name, 0.0), float(latency.quantile(TAIL)) / bound)
    return Signals(rows=rows, view=observe(run, requests, rows), worst=worst)


def _fire(signals: Signals) -> Iterator[SaidCause]:
    seen: set[str] = set()
    for rule in RULES:
        value = rule.value(signals)
        if value > rule.bound and rule.key not in seen:
            seen.add(rule.key)
            statement = f"{rule.words}: {value:.3g} against {rule.bound:g}"
            fact = evidence(statement, value, "", "client; scrapes")
            named = CAUSES[rule.key]
            yield SaidCause(key=rule.key, lifecycle=named.lifecycles[0], kind=named.kind, statement=statement,
                            evidence=[fact])  # fmt: skip
