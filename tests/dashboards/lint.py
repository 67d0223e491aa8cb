"""Faults that dashboards of other servers have shipped with, each as one rule over Grafana's JSON.

A rule is a function of a dashboard that yields sentences; `faults` asks them all.
"""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from sojourn.dashboards.boards import BOARDS
from sojourn.dashboards.neutral import BOUND, FAMILIES, SPAN_REQUESTS, SPAN_SECONDS, neutral
from sojourn.dashboards.rules import rules
from sojourn.dashboards.views import CHOICES
from sojourn.live.watch.exposition import HELP
from sojourn.metrics.catalog.catalog import CATALOG, METRIC_BY_NAME, Metric, sample_names

Board = dict[str, Any]
OWN_SAMPLES: dict[str, Metric] = {sample: metric for metric in CATALOG for sample in sample_names(metric)}
FAMILIES_OF_ALL = {
    sample: METRIC_BY_NAME[name] for name in (*FAMILIES, BOUND) for sample in sample_names(METRIC_BY_NAME[name])
}
# Every name that some series has: ours, and those that recording rules give to every engine.
METRIC_OF_SAMPLE = OWN_SAMPLES | {neutral(name): metric for name, metric in FAMILIES_OF_ALL.items()}
CHOSEN = {*CHOICES}  # variables that only some families have as a label
CHOSEN_FAMILIES = {family for families in CHOICES.values() for family in families}
SPANS = (SPAN_SECONDS, SPAN_REQUESTS)  # counters without a family
NAME = r"(?:sojourn_|llm:)\w+"
RECORDED = {rule["record"] for group in rules()["groups"] for rule in group["rules"] if "record" in rule}
BY_MODEL = r"model_name:[\w:]+"  # recorded for each model: their other labels are summed over


def faults(board: Board) -> list[str]:
    return [sentence for rule in RULES for sentence in rule(board)]


def shown_panels(board: Board) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def expressions(board: Board) -> list[tuple[str, str]]:
    """(panel title, expression) of every target."""
    return [(panel["title"], target["expr"]) for panel in shown_panels(board) for target in panel["targets"]]


def panel_unit(panel: dict[str, Any]) -> str:
    if panel["type"] == "heatmap":
        return panel["options"]["yAxis"].get("unit", "")
    return panel["fieldConfig"]["defaults"].get("unit", "")


def panels_explain_themselves(board: Board) -> Iterator[str]:
    for panel in shown_panels(board):
        for key, text in (
            ("title", panel["title"]),
            ("description", panel["description"]),
            ("unit", panel_unit(panel)),
        ):
            if not text or text == "none":
                yield f"panel {panel['id']} {panel['title']!r} has no {key}"
        if not panel["targets"]:
            yield f"{panel['title']!r} asks for nothing"


def ids_and_titles_are_unique(board: Board) -> Iterator[str]:
    for key in ("id", "title"):
        for value, times in Counter(panel[key] for panel in board["panels"]).items():
            if times > 1:
                yield f"{key} {value!r} stands {times} times"
    for panel in shown_panels(board):
        references = [target["refId"] for target in panel["targets"]]
        if len(set(references)) < len(references):
            yield f"{panel['title']!r} repeats a refId"


def panels_do_not_overlap(board: Board) -> Iterator[str]:
    taken: dict[tuple[int, int], str] = {}
    for panel in board["panels"]:
        grid = panel["gridPos"]
        if grid["x"] < 0 or grid["x"] + grid["w"] > 24:
            yield f"{panel['title']!r} leaves the grid"
        for x in range(grid["x"], grid["x"] + grid["w"]):
            for y in range(grid["y"], grid["y"] + grid["h"]):
                if (x, y) in taken:
                    yield f"{panel['title']!r} covers {taken[x, y]!r}"
                    return
                taken[x, y] = panel["title"]


def variables_are_used(board: Board) -> Iterator[str]:
    names = {variable["name"] for variable in board["templating"]["list"]} - {"datasource"}
    for title, expr in [*expressions(board), *annotations(board)]:
        for family, selector in re.findall(rf"(?<![\w:])({BY_MODEL}|{NAME})(\{{[^}}]*\}})?", expr):
            labels = {*METRIC_OF_SAMPLE[family].labels} if family in METRIC_OF_SAMPLE else set()
            wanted = (
                {"model_name"}
                if family in RECORDED and not family.startswith("llm:")
                else names - CHOSEN | ({*CHOICES} & labels & names if family in CHOSEN_FAMILIES else set())
            )
            for name in sorted(wanted):
                if not re.search(rf'{name}=~"\${name}\|?"', selector):
                    yield f"{title!r} ignores ${name}"
        for used in re.findall(r"\$\{?(\w+)", expr):
            if used not in names and used not in ("__rate_interval", "__range"):
                yield f"{title!r} uses ${used}, which is no variable"


def datasource_is_a_variable(board: Board) -> Iterator[str]:
    if "datasource" not in {variable["name"] for variable in board["templating"]["list"]}:
        yield "no variable for the data source"
    for panel in shown_panels(board):
        for item in (panel, *panel["targets"]):
            if item["datasource"] != {"type": "prometheus", "uid": "${datasource}"}:
                yield f"{panel['title']!r} fixes its data source"


def metrics_exist(board: Board) -> Iterator[str]:
    for title, expr in [*expressions(board), *annotations(board)]:
        recorded = re.findall(r"\b(?:model_name|instance|sojourn):[\w:]+", expr)
        for name in {*recorded} - RECORDED:
            yield f"{title!r} queries {name}, which no rule records"
        names = re.findall(rf"(?<![\w:]){NAME}", expr)
        if not names and not recorded and not expr.startswith(("ALERTS{", "max by (alertname, severity) (ALERTS{")):
            yield f"{title!r} queries no metric of ours"
        for name in names:
            if name not in METRIC_OF_SAMPLE and name not in (*SPANS, *HELP):
                yield f"{title!r} queries {name}, which nobody exports"


def annotations(board: Board) -> list[tuple[str, str]]:
    return [(each["name"], each["target"]["expr"]) for each in board["annotations"]["list"]]


def events_have_words_and_a_source(board: Board) -> Iterator[str]:
    for each in board["annotations"]["list"]:
        words = f"{each['titleFormat']} {each['textFormat']}"
        if each["datasource"] != {"type": "prometheus", "uid": "${datasource}"}:
            yield f"annotation {each['name']} fixes its data source"
        if not any(name in words for name in (*re.findall(NAME, each["target"]["expr"]), "ALERTS")):
            yield f"annotation {each['name']} does not name its series"
        grouped = re.search(r"by \(([^)]*)\)", each["target"]["expr"])
        for label in {*re.findall(r"\{\{(\w+)\}\}", words)} if grouped else ():
            if label not in grouped[1].split(", "):
                yield f"annotation {each['name']} names {label}, which its series lack"


def counters_are_rated_and_gauges_are_not(board: Board) -> Iterator[str]:
    for title, expr in expressions(board):
        for before, name in re.findall(r"(\w+ ?\()?(" + NAME + r")\{", expr):
            metric = METRIC_OF_SAMPLE.get(name)
            rated = before.strip(" (") in ("rate", "increase")
            if metric and rated != (metric.kind != "gauge"):
                yield f"{title!r}: {name} is a {metric.kind} and is {'rated' if rated else 'not rated'}"
        for window in re.findall(r"\[([^\]]+)\]", expr):
            if window not in ("$__rate_interval", "$__range"):
                yield f"{title!r} rates over {window}, not over $__rate_interval"


def buckets_of_engines_are_never_added_up(board: Board) -> Iterator[str]:
    for title, expr in expressions(board):
        if re.search(r"llm:\w+_bucket", expr) and not re.search(r"by \([^)]*\bengine\b", expr):
            yield f"{title!r} adds up buckets of engines, whose bounds differ"


def links_lead_to_dashboards_and_take_the_variables(board: Board) -> Iterator[str]:
    for panel in shown_panels(board):
        for link in panel.get("links", ()):
            uid = link["url"].removeprefix("/d/").partition("?")[0]
            if uid not in {known.uid for known in BOARDS}:
                yield f"{panel['title']!r} opens {uid}, which is no dashboard"
            if not {"${__all_variables}", "${__url_time_range}"} <= set(link["url"].partition("?")[2].split("&")):
                yield f"{panel['title']!r} opens {uid} without its variables or its time"


def quantiles_keep_le(board: Board) -> Iterator[str]:
    for title, expr in expressions(board):
        for inner in re.findall(r"histogram_quantile\([\d.]+, (.*)", expr):
            if not re.match(r"sum by \((?:\w+, )*le(?:, \w+)*\) \(rate\([\w:]+_bucket\{", inner):
                yield f"{title!r} takes a quantile without le, or not of buckets"


def sums_are_divided_by_their_counts(board: Board) -> Iterator[str]:
    for title, expr in expressions(board):
        for name in re.findall(r"(" + NAME + r")_sum\{", expr):
            if f"{name}_count" not in expr:
                yield f"{title!r} plots {name}_sum without its count"


def units_fit_the_metrics(board: Board) -> Iterator[str]:
    for panel in shown_panels(board):
        for target in panel["targets"]:
            quantile = re.match(r"histogram_quantile\([^,]+, .*?(" + NAME + r"_bucket)", target["expr"])
            metric = METRIC_OF_SAMPLE.get(quantile[1]) if quantile else None
            if metric and (metric.unit == "seconds") != (panel_unit(panel) == "s"):
                yield f"{panel['title']!r} shows {metric.name} as {panel_unit(panel)}"


def nothing_of_the_old_schema_is_left(board: Board) -> Iterator[str]:
    if board["schemaVersion"] < 39:
        yield f"schemaVersion is {board['schemaVersion']}"
    for key in ("__inputs", "rows", "style", "gnetId", "sharedCrosshair", "hideControls"):
        if key in board:
            yield f"{key} is of the old schema"
    for panel in board["panels"]:
        old = {"span", "editable", "error", "yAxis", "xAxis", "tooltip", "cards"} & set(panel)
        old |= {
            key for target in panel.get("targets", []) for key in ("intervalFactor", "step", "metric") if key in target
        }
        if old:
            yield f"{panel['title']!r} has {', '.join(sorted(old))} of the old schema"


RULES = (
    panels_explain_themselves, ids_and_titles_are_unique, panels_do_not_overlap, variables_are_used,
    datasource_is_a_variable, metrics_exist, counters_are_rated_and_gauges_are_not, quantiles_keep_le,
    events_have_words_and_a_source,
    buckets_of_engines_are_never_added_up, links_lead_to_dashboards_and_take_the_variables,
    sums_are_divided_by_their_counts, units_fit_the_metrics, nothing_of_the_old_schema_is_left,
)  # fmt: skip
