"""Which queries of dashboards and rules a server can never answer, and what they should ask instead."""

import re
from collections.abc import Collection, Iterable, Iterator
from typing import Literal

import msgspec

from sojourn.interop.queries.exported import Exported, namespace
from sojourn.interop.queries.read import Query
from sojourn.interop.queries.replaced import gone, split, successor
from sojourn.interop.queries.selectors import NAME, Asked, Matcher, Selector, asked_by
from sojourn.interop.sources.names import is_router
from sojourn.interop.sources.registry import SOURCES

Severity = Literal["high", "medium", "low"]
Key = Literal[
    "missing_family", "other_server", "no_series_yet", "missing_part", "missing_label", "missing_value",
    "rate_of_gauge", "quantile_without_le", "unreadable",
]  # fmt: skip
# Labels that a Prometheus adds to what it scrapes, or that stand in a histogram: a page need not have them.
OF_THE_SCRAPE = {
    "job", "instance", "namespace", "pod", "pod_name", "container", "container_name", "service", "endpoint", "node",
    "cluster", "host", "hostname", "nodename", "env", "environment", "region", "zone", "app", "prometheus", "receive",
    "tenant_id", "replica", "uid", "image", "le", "quantile",
}  # fmt: skip
BY_THE_SCRAPE = re.compile(r"exported_|kubernetes_|k8s_|label_|annotation_|__")
SERVERS = {namespace(source.prefix): source.title for source in SOURCES}
ORDER: tuple[Severity, ...] = ("high", "medium", "low")


class QueryFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that queries ask for and the server has not."""

    severity: Severity  # high: no answer ever; medium: an answer that misleads, or none; low: none now
    key: Key
    asked: str  # the name, the label's name and value, or the expression
    says: str
    fix: str
    owners: list[str]  # the panels, alerts and variables that ask for it


class QueryReport(msgspec.Struct, frozen=True, kw_only=True):
    queries: int
    judged: int  # of them; the others ask other exporters only, or leave the family to a variable
    answered: int  # of those that were judged, without a finding
    families: int  # that the page exports
    servers: list[str]
    findings: list[QueryFinding]
    elsewhere: dict[str, int]  # families of other exporters, and how many queries ask for them
    other_sources: int  # queries of other data sources than Prometheus: not judged
    chosen: int  # queries that leave a family to a variable


def judge(queries: Iterable[Query], exported: Exported, other_sources: int = 0) -> QueryReport:
    """Findings by severity, most asked first. A name that a rule of the same documents records is known."""
    queries = list(queries)
    recorded = {query.record for query in queries if query.record}
    found: dict[tuple[str, str], QueryFinding] = {}
    elsewhere: dict[str, int] = {}
    judged = answered = chosen = 0
    for query in queries:
        try:
            asked = asked_by(query.expr)
        except ValueError as error:
            findings, is_judged = [_unreadable(query.expr, str(error))], True
        else:
            chosen += any(selector.name == NAME for selector in asked.selectors)
            others = {each.name or each.pattern for each in asked.selectors
                      if each.name != NAME and _is_elsewhere(each, exported)}  # fmt: skip
            elsewhere.update((name, elsewhere.get(name, 0) + 1) for name in others - recorded)
            is_judged = any(each.name != NAME and (each.name or each.pattern) not in others - recorded
                            for each in asked.selectors)  # fmt: skip
            findings = list(_findings(query, asked, exported, recorded | others))
        judged += is_judged
        answered += is_judged and not findings
        for each in findings:
            known = found.setdefault((each.key, each.asked), each)
            if query.owner not in known.owners:
                known.owners.append(query.owner)
    order = sorted(found.values(), key=lambda each: (ORDER.index(each.severity), -len(each.owners), each.asked))
    return QueryReport(
        queries=len(queries), judged=judged, answered=answered, families=len(exported.types), chosen=chosen,
        findings=order, servers=[source.title for source in exported.sources],
        elsewhere=dict(sorted(elsewhere.items())), other_sources=other_sources,
    )  # fmt: skip


def _findings(query: Query, asked: Asked, exported: Exported, unjudged: set[str]) -> Iterator[QueryFinding]:
    for selector in asked.selectors:
        name = selector.name
        if name == NAME or (name or selector.pattern) in unjudged or not (name or selector.pattern):
            continue
        if name in exported.samples:
            yield from _of_series(query, selector, exported)
        elif not any(_has(other, exported) for other in selector.others) and not _has(selector, exported):
            yield _missing(selector, exported)
    for name in asked.quantiles_without_le:
        yield _finding(
            "high", "quantile_without_le", name,
            "histogram_quantile gets buckets without their bounds, so that it is always empty",
            "keep le in the aggregation: sum by (le, …)",
        )  # fmt: skip


def _has(selector: Selector, exported: Exported) -> bool:
    return selector.name in exported.samples or bool(selector.pattern and exported.matching(selector.pattern))


def _is_elsewhere(selector: Selector, exported: Exported) -> bool:
    """Whether the name is another exporter's, such as `node_…` or a router's beside a page of vLLM."""
    if _has(selector, exported):
        return False
    if not selector.name:
        return not any(each in selector.pattern for each in (*exported.namespaces, *SERVERS))
    if is_router({selector.name}):
        return True
    own = namespace(selector.name)
    return own not in exported.namespaces and own not in SERVERS and not exported.has_family(split(selector.name)[0])


def _missing(selector: Selector, exported: Exported) -> QueryFinding:
    name = selector.name or selector.pattern
    family, part = split(name)
    if exported.has_family(name) or (part and exported.has_family(family)):
        if not part and exported.type_of(name) in ("histogram", "summary") and f"{name}_count" in exported.samples:
            return _finding(
                "high", "missing_part", name, "it is a histogram, which has no series of this name",
                f"ask for {name}_bucket (quantiles), or for {name}_sum and {name}_count (the mean)",
            )  # fmt: skip
        if all(split(sample)[0] not in (family, f"{family}_total") for sample in exported.samples):
            return _finding(
                "low", "no_series_yet", name, "the server exports it, and had no series of it when the page was read",
                "read the page again under load, or expect it empty until the first event",
            )  # fmt: skip
    return _without_family(name, family, part, bool(selector.name), exported)


def _without_family(name: str, family: str, part: str, is_name: bool, exported: Exported) -> QueryFinding:
    found = successor(name, exported) if is_name else None
    server = SERVERS.get(namespace(name))
    is_other = server is not None and namespace(name) not in exported.namespaces
    here = " and ".join(source.title for source in exported.sources) or "the server"
    asked, instead = name, found.name if found else ""
    if part and instead.endswith(part):  # the parts of a histogram are one finding
        asked, instead = f"{family}_*", f"{instead.removesuffix(part)}_*"
    return _finding(
        "high", "other_server" if is_other else "missing_family", asked,
        f"it is {server}'s name, and the page is {here}'s" if is_other else f"{here} does not export it",
        f"ask for {instead}: {found.why}" if found else gone(name),
    )  # fmt: skip


def _of_series(query: Query, selector: Selector, exported: Exported) -> Iterator[QueryFinding]:
    """What is wrong with a query of a family that is there."""
    name, labels = selector.name, exported.samples[selector.name]
    has = f"it has {', '.join(sorted(labels))}" if labels else "it has no label"
    for label in _wrong_labels(query, selector, labels):
        yield _finding(
            "medium", "missing_label", f"{name} {{{label}}}", f"the server gives it no label {label} ({has})",
            f"leave {label} out, unless your Prometheus adds it when it scrapes",
        )  # fmt: skip
    for each in selector.matchers:
        values = labels.get(each.label, set())
        if _is_wrong_value(each, values):
            shown = sorted(values)
            listed = ", ".join(shown[:6]) + (f" and {len(shown) - 6} more" if len(shown) > 6 else "")
            yield _finding(
                "low", "missing_value", f'{name} {{{each.label}="{each.value}"}}',
                f"no series has this value now: {each.label} is {listed}",
                "choose one of these, or expect it empty until it occurs",
            )  # fmt: skip
    if selector.is_counted and exported.type_of(name) == "gauge":
        yield _finding(
            "medium", "rate_of_gauge", name, "it is a gauge: rate() and increase() take each fall for a restart",
            "use deriv() or delta(), or avg_over_time() for its level",
        )  # fmt: skip


def _wrong_labels(query: Query, selector: Selector, labels: Collection[str]) -> list[str]:
    """Labels that a query needs, and neither the server nor a Prometheus gives."""
    asked = {query.label, *selector.grouped_by, *(each.label for each in selector.matchers)} - {"", NAME, *labels}
    # a pattern may fit the label that is not there
    patterns = {each.label for each in selector.matchers if not each.is_equal and not each.is_chosen}
    return sorted(each for each in asked - OF_THE_SCRAPE - patterns if not BY_THE_SCRAPE.match(each))


def _is_wrong_value(matcher: Matcher, values: Collection[str]) -> bool:
    is_fixed = matcher.is_equal and not matcher.is_chosen and bool(matcher.value)
    is_own = matcher.label not in OF_THE_SCRAPE or matcher.label in ("le", "quantile")
    return is_fixed and is_own and bool(values) and matcher.value not in values


def _finding(severity: Severity, key: Key, asked: str, says: str, fix: str) -> QueryFinding:
    return QueryFinding(severity=severity, key=key, asked=asked, says=says, fix=fix, owners=[])


def _unreadable(expr: str, error: str) -> QueryFinding:
    return _finding(
        "medium", "unreadable", " ".join(expr.split())[:200], f"it cannot be read as PromQL: {' '.join(error.split())}",
        "open it in Grafana's editor; variables that stand for parts of PromQL cannot be judged",
    )  # fmt: skip
