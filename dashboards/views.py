"""Metrics of the catalogue → what a panel shows: PromQL, legend, unit and the words that explain it.

Each view is a pure function of metric names. Rates use `$__rate_interval`, quantiles keep `le`, sums of a histogram are
always divided by its count, and every selector honours the dashboard's variables.
"""

import re
from dataclasses import dataclass
from typing import Literal

from sojourn.dashboards.neutral import BOUND, SPAN_REQUESTS, SPAN_SECONDS, catalogue_name, neutral
from sojourn.metrics.catalog.catalog import CATALOG, METRIC_BY_NAME, Metric, sample_names

SELECTOR = 'job=~"$job",model_name=~"$model_name",instance=~"$instance"'
# Variables of the families that have their label, beside those of SELECTOR.
CHOICES = {
    "klass": (
        "sojourn_request_objective_total", "sojourn_token_good_tokens_total", "sojourn_request_objective_bound_seconds",
        "llm:request_objective_bound_seconds",
    ),
    "tenant": ("sojourn_request_tenant_requests_total", "sojourn_request_price_total"),
}  # fmt: skip
QUANTILES = (0.5, 0.9, 0.99)
Shape = Literal["lines", "stack", "heatmap", "number", "states"]
SUMMED = "suffix: s/s"  # of seconds that several requests or ranks spend at once: no share of wall time

# Grafana's names of units, for a value and for its growth per second.
VALUE_UNITS = {
    "seconds": "s", "ratio": "percentunit", "bytes": "bytes", "tokens": "suffix: tokens",
    "requests": "suffix: requests", "blocks": "suffix: blocks", "slots": "suffix: slots", "info": "suffix: servers",
    "nats": "suffix: nats", "watts": "watt", "hertz": "hertz", "celsius": "celsius", "state": "bool_on_off",
    "flops_per_second": "flops", "bytes_per_second": "Bps", "connections": "suffix: connections",
    "price": "suffix: in the list's currency",
}  # fmt: skip
RATE_UNITS = {
    "seconds": "percentunit", "tokens": "suffix: tokens/s", "bytes": "Bps", "flops": "flops", "requests": "reqps",
    "blocks": "suffix: blocks/s", "rows": "suffix: rows/s", "joules": "watt",
    "steps": "suffix: steps/s", "records": "suffix: records/s",
    "traces": "suffix: traces/s", "texts": "suffix: texts/s", "reloads": "suffix: reloads/s",
    "failures": "suffix: failures/s", "connections": "suffix: connections/s", "hangs": "suffix: hangs/s",
    "messages": "suffix: messages/s", "adapters": "suffix: adapters/s", "leases": "suffix: leases/s",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression and what its series are called."""

    expr: str
    legend: str
    is_bound: bool = False  # an objective: drawn dashed


@dataclass(frozen=True, slots=True)
class Panel:
    """What one panel shows, before it becomes Grafana's JSON. `width` is in the 24 columns of the grid."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    shape: Shape = "lines"
    width: int = 8
    repeats: bool = False  # once for each chosen server, side by side on the same width
    by_account: bool = False  # series are accounts of the ledger, coloured by their lifecycle
    note: str = ""  # how to read the expression, where the metrics' own meaning does not say it
    is_derived: bool = False  # the figure is not what its metrics mean: the note alone describes it
    opens: str = ""  # the dashboard to look at next, with the same variables and time
    limits: tuple[float, ...] = ()  # above the first it is noteworthy, above the second it is full

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return metrics_of(" ".join(query.expr for query in self.queries))

    @property
    def description(self) -> str:
        meanings = () if self.is_derived else (metric.help for metric in self.metrics)
        return "\n\n".join([*([self.note] if self.note else []), *meanings])


_METRIC_OF_SAMPLE = {sample: metric for metric in CATALOG for sample in sample_names(metric)}
_SAMPLE = re.compile(r"(?<![\w:])(?:sojourn_|llm:)[a-z0-9_]+")
# No family of the catalogue: those of recording rules, and that of a watch.
_OTHERS = (SPAN_SECONDS, SPAN_REQUESTS, "sojourn_watch_finding")


def metrics_of(expr: str) -> tuple[Metric, ...]:
    """The catalogue's metrics in an expression, each once, also under their neutral names.

    Raises KeyError for one that the catalogue lacks.
    """
    names = [name for name in _SAMPLE.findall(expr) if name not in _OTHERS]
    return tuple(dict.fromkeys(_METRIC_OF_SAMPLE[catalogue_name(name)] for name in names))


def selector(name: str, where: str = "") -> str:
    """The matchers of a family: `where`, and the dashboard's variables."""
    own = [f'{label}=~"${label}"' for label, families in CHOICES.items() if name in families]
    return ",".join([*([where] if where else []), SELECTOR, *own])


def rate(name: str, by: str = "", where: str = "", operator: str = "sum") -> str:
    """Growth per second of a counter, summed over instances and all labels but `by`."""
    grouping = f" by ({by})" if by else ""
    return f"{operator}{grouping} (rate({name}{{{selector(name, where)}}}[$__rate_interval]))"


def increase(name: str, by: str = "", where: str = "") -> str:
    """Growth of a counter over the time that is shown."""
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (increase({name}{{{selector(name, where)}}}[$__range]))"


def gauge(name: str, by: str = "", operator: str = "sum") -> str:
    grouping = f" by ({by})" if by else ""
    return f"{operator}{grouping} ({name}{{{selector(name)}}})"


def rates(title: str, *names: str, by: str = "", unit: str = "", **options) -> Panel:
    """How fast counters grow. With `by`, one series per label value; else one per counter."""
    queries = tuple(Query(rate(name, by), _legend(by) or _short(name)) for name in names)
    return Panel(title, unit or RATE_UNITS[METRIC_BY_NAME[names[0]].unit], queries, **options)


def gauges(title: str, *names: str, by: str = "", operator: str = "sum", **options) -> Panel:
    queries = tuple(Query(gauge(name, by, operator), _legend(by) or _short(name)) for name in names)
    return Panel(title, VALUE_UNITS[METRIC_BY_NAME[names[0]].unit], queries, **options)


def quantiles(title: str, name: str, by: str = "", **options) -> Panel:
    """Median, p90 and p99 of a histogram; the exact ones are in the run directory."""
    legend = f" {_legend(by)}" if by else ""
    buckets = rate(f"{name}_bucket", by=f"le, {by}" if by else "le")
    queries = tuple(Query(f"histogram_quantile({q:g}, {buckets})", f"p{100 * q:g}{legend}") for q in QUANTILES)
    return Panel(title, VALUE_UNITS[METRIC_BY_NAME[name].unit], queries, **options)


def by_server(title: str, name: str, quantile: float, objective: str = "", **options) -> Panel:
    """A quantile of a neutral histogram for each server, with the objective that bounds it.

    Engines have different bucket bounds, so that their buckets are never added up.
    """
    buckets = rate(f"{name}_bucket", by="le, engine, instance")
    queries = [Query(f"histogram_quantile({quantile:g}, {buckets})", "{{instance}} ({{engine}})")]
    if objective:
        matchers = selector(neutral(BOUND), f'objective="{objective}"')
        bounds = f"min by (klass) ({neutral(BOUND)}{{{matchers}}})"
        queries.append(Query(bounds, "objective of {{klass}}", is_bound=True))
    unit = VALUE_UNITS[METRIC_BY_NAME[catalogue_name(name)].unit]
    return Panel(title, unit, tuple(queries), **options)


def heatmap(title: str, name: str, **options) -> Panel:
    """How often each bucket was hit, over time: shows two modes where quantiles show a lie."""
    query = Query(rate(f"{name}_bucket", by="le"), "{{le}}")
    return Panel(title, VALUE_UNITS[METRIC_BY_NAME[name].unit], (query,), shape="heatmap", **options)


def share(title: str, part: str, whole: str, legend: str, unit: str = "percentunit", **options) -> Panel:
    """One expression over another."""
    return Panel(title, unit, (Query(f"{part} / {whole}", legend),), **options)


def per_request(title: str, name: str) -> Panel:
    """Mean seconds of each account of the ledger for one ended request, stacked."""
    ended = rate("sojourn_request_finished_total")
    expr = f"{rate(name, by='lifecycle, account')} / ignoring (lifecycle, account) group_left () {ended}"
    return Panel(title, "s", (Query(expr, "{{account}}"),), shape="stack", width=12, by_account=True)


def _legend(by: str) -> str:
    return " ".join(f"{{{{{label}}}}}" for label in by.split(", ") if label)


def _short(name: str) -> str:
    """A metric's name without the prefix and lifecycle, which the dashboard says already."""
    noun = name.removesuffix("_total").split("_", 2)[2]
    for unit in ("_tokens", "_seconds", "_records"):
        noun = noun.removesuffix(unit)
    return noun.replace("_", " ")
