"""Queries of dashboards and rules beside a page: renames are named, schemas read alike, and nothing else is blamed."""

import gzip
import json
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sojourn.dashboards.build import contents
from sojourn.interop.queries.exported import Exported, read_exported
from sojourn.interop.queries.judge import judge
from sojourn.interop.queries.read import Query, is_asking, read_queries
from sojourn.interop.queries.replaced import GONE, REPLACED
from sojourn.interop.queries.selectors import asked_by
from sojourn.interop.sources.registry import SOURCES
from sojourn.metrics.catalog.catalog import CATALOG, METRIC_BY_NAME
from sojourn.metrics.errors import InputError

PAGE = gzip.decompress((Path(__file__).parents[2] / "dashboards/pages/vllm-0.32.0.prom.gz").read_bytes()).decode()
VLLM = read_exported([("page", PAGE)])
RUNNING = 'vllm:num_requests_running{model_name="$model"}'


def findings(*exprs: str, exported: Exported = VLLM, label: str = "") -> list[tuple[str, str, str]]:
    report = judge([Query(f"panel {number}", expr, label) for number, expr in enumerate(exprs)], exported)
    return [(each.severity, each.key, each.fix) for each in report.findings]


def page_of(names: dict[str, str]) -> Exported:
    """A page with these families: name → type."""
    lines = []
    for name, kind in names.items():
        lines.append(f"# TYPE {name} {kind}")
        parts = ('_bucket{le="+Inf"}', "_sum", "_count") if kind == "histogram" else ("",)
        lines += [f"{name}{part} 1" for part in parts]
    return read_exported([("page", "\n".join(lines) + "\n")])


RENAMES = [
    (source.key, old[at].name, new[at].name, METRIC_BY_NAME[item.ours].kind)
    for source in SOURCES
    for item in source.translations
    for new in item.theirs[:1]
    for old in item.theirs[1:]
    if len(old) == len(new)
    for at in range(len(new))
    if old[at].name != new[at].name
]


@pytest.mark.parametrize(("server", "old", "new", "kind"), RENAMES)
def test_each_rename_that_the_sources_know_is_named(server, old, new, kind):
    exported = page_of({new: kind, "vllm:a": "gauge", "sglang:a": "gauge"})
    part, shown = ("_bucket", "_*") if kind == "histogram" else ("", "")
    [(severity, key, fix)] = findings(f"sum(rate({old}{part}[5m]))", exported=exported)
    assert (severity, key) == ("high", "missing_family") and fix.startswith(f"ask for {new}{shown}: ")


@pytest.mark.parametrize("old", [*GONE, *REPLACED])
def test_what_has_no_single_successor_says_why(old):
    [(severity, _, fix)] = findings(old)
    assert (severity == "high" and (GONE | REPLACED)[old] in fix) or (old in REPLACED and "spec_decode" in old)


def test_another_servers_dashboard_is_translated():
    [(severity, key, fix)] = findings("sum(sglang:num_running_reqs)")
    assert (severity, key) == ("high", "other_server") and "vllm:num_requests_running" in fix


def test_rays_prefix_is_seen_in_both_directions():
    ray = page_of({"ray_vllm_num_requests_running": "gauge"})
    assert "ray_vllm_num_requests_running" in findings("vllm:num_requests_running", exported=ray)[0][2]
    assert "vllm:num_requests_running" in findings("ray_vllm_num_requests_running")[0][2]


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        (RUNNING, []),
        ('vllm:num_requests_running{job="a", pod=~"x.*", exported_job="b"}', []),
        ("vllm:num_requests_running or sglang:num_running_reqs", []),
        ("label_replace(vllm:num_requests_running, 'x', '$1', 'engine', '(.*)') * on (x) up", []),
        ('{__name__=~"vllm:num_requests_.+"}', []),
        ("sum by ($label) (vllm:num_requests_running)", []),
        ("$metric * 2", []),
        ("topk($top, vllm:num_requests_running)", []),
        ("sum(rate(vllm:generation_tokens_total[$__rate_interval])) / $__range_s", []),
        ("rate(vllm:generation_tokens_total[[[window]]])", []),
        ('histogram_quantile(0.9, sum by (le) (rate(vllm:time_to_first_token_seconds_bucket[${w}])))', []),
        ("histogram_quantile(0.9, sum without (engine) (rate(vllm:time_to_first_token_seconds_bucket[5m])))", []),
        ("node_load1 + kube_pod_info + DCGM_FI_DEV_GPU_UTIL", []),
        ("vllm:num_requests_runing", ["missing_family"]),
        ("vllm:generation_tokens", ["missing_family"]),
        ("vllm:time_to_first_token_seconds", ["missing_part"]),
        ('vllm:num_requests_running{model="x"}', ["missing_label"]),
        ("sum by (model) (vllm:num_requests_running)", ["missing_label"]),
        ('vllm:request_success_total{finished_reason="never"}', ["missing_value"]),
        ("rate(vllm:num_requests_running[5m])", ["rate_of_gauge"]),
        ("histogram_quantile(0.9, sum by (engine) (rate(vllm:time_to_first_token_seconds_bucket[5m])))",
         ["quantile_without_le"]),
        ("sum(vllm:num_requests_running", ["unreadable"]),
        ('{__name__=~"vllm:gpu_.+"}', ["missing_family"]),
    ],
)  # fmt: skip
def test_a_query_gets_its_finding_and_no_other(expr, expected):
    assert [key for _, key, _ in findings(expr)] == expected


def test_a_family_without_a_series_yet_is_empty_now_and_no_fault():
    exported = read_exported([("page", "# TYPE vllm:aborts counter\nvllm:num_requests_running 1\n")])
    assert [each[:2] for each in findings("rate(vllm:aborts_total[5m])", exported=exported)] == [
        ("low", "no_series_yet")
    ]


def test_a_recorded_name_is_known_and_its_own_query_is_judged():
    rules = {"groups": [{"name": "g", "rules": [
        {"record": "vllm:queue", "expr": "vllm:num_requests_waiting"},
        {"alert": "Queue", "expr": "vllm:queue > 3"},
        {"alert": "Full", "expr": "vllm:gpu_cache_usage_perc > 0.9"},
    ]}]}  # fmt: skip
    found = read_queries(yaml.safe_dump(rules), "rules.yaml")
    report = judge(found.found, VLLM)
    assert [(each.asked, each.owners) for each in report.findings] == [("vllm:gpu_cache_usage_perc", ['alert "Full"'])]
    assert (report.queries, report.judged, report.answered) == (3, 3, 2)


def test_what_other_exporters_have_is_counted_and_not_judged():
    report = judge([Query("a", "node_load1"), Query("b", "$metric"), Query("c", "node_load1 + vllm:none")], VLLM)
    assert (report.queries, report.judged, report.answered) == (3, 1, 0)
    assert report.elsewhere == {"node_load1": 2} and report.chosen == 1


PANEL = {"title": "Batch", "targets": [{"expr": RUNNING}]}
VARIABLE = {"name": "model", "type": "query", "query": "label_values(vllm:num_requests_running, model_name)"}
CLASSIC = {"panels": [PANEL], "templating": {"list": [VARIABLE]}}
DOCUMENTS = {
    "classic": CLASSIC,
    "from the API": {"dashboard": CLASSIC, "meta": {}},
    "panels within a row": {"panels": [{"type": "row", "panels": [PANEL]}], "templating": {"list": [VARIABLE]}},
    "rows of old": {"rows": [{"title": "Row", "panels": [PANEL]}], "templating": {"list": [VARIABLE]}},
    "a variable with a mapping": {"panels": [PANEL], "templating": {"list": [
        {"name": "model", "query": {"query": VARIABLE["query"], "refId": "x"}}]}},
    "v2": {"spec": {"elements": {"panel-1": {"kind": "Panel", "spec": {"title": "Batch", "data": {"kind": "QueryGroup",
        "spec": {"queries": [{"kind": "PanelQuery", "spec": {"query": {"kind": "DataQuery", "group": "prometheus",
        "spec": {"expr": RUNNING}}}}]}}}}}, "variables": [{"kind": "QueryVariable", "spec": {"name": "model",
        "query": {"kind": "DataQuery", "group": "prometheus", "spec": {"query": VARIABLE["query"]}}}}]}},
    "in a ConfigMap": {"kind": "ConfigMap", "data": {"board.json": json.dumps(CLASSIC, indent=1)}},
}  # fmt: skip


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_schema_gives_the_same_queries(name):
    expected = {
        Query('panel "Batch"', RUNNING), Query('variable "model"', "vllm:num_requests_running", label="model_name"),
    }  # fmt: skip
    for text in (json.dumps(DOCUMENTS[name]), yaml.safe_dump(DOCUMENTS[name])):
        assert is_asking(text) and set(read_queries(text, name).found) == expected


def test_queries_of_another_data_source_are_counted_and_not_judged():
    loki = {"title": "Logs", "datasource": {"type": "loki"}, "targets": [{"expr": '{app="vllm"} |= "error"'}]}
    found = read_queries(json.dumps({"panels": [PANEL, loki]}), "board.json")
    assert (len(found.found), found.other) == (1, 1)


def test_our_own_dashboards_ask_our_page_for_nothing_that_it_lacks():
    exported = Exported()
    for metric in CATALOG:
        exported.types[metric.name.removesuffix("_total")] = metric.kind
        labels = {label: {value[at] for value in metric.values} for at, label in enumerate(metric.labels)}
        parts = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        exported.samples |= {f"{metric.name}{part}": labels for part in parts}
    boards = {name: text for name, text in contents().items() if name.endswith(".json")}
    assert len(boards) > 4
    for name, text in boards.items():
        report = judge(read_queries(text, name).found, exported)
        bad = [each for each in report.findings if each.severity == "high" and each.asked in METRIC_BY_NAME]
        assert report.queries > 3 and not bad


@given(st.text(max_size=80) | st.text("{}[]:$\"'(),~=abc_ \n-", max_size=60))
def test_no_text_makes_more_than_a_clear_error(text):
    for read in (lambda: read_queries(text, "file"), lambda: read_exported([("page", text)])):
        with suppress(InputError):
            read()
    with suppress(ValueError):
        asked_by(text)
