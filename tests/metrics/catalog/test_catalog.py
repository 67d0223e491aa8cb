"""The catalogue keeps its own rules, and the page made from it is up to date."""

from pathlib import Path

import pytest

from sojourn.metrics.catalog.catalog import CATALOG, METRIC_BY_NAME, OWNERS, render_markdown, sample_names
from sojourn.metrics.catalog.metric import log_buckets
from sojourn.metrics.request.objectives import SERVER_OBJECTIVES

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("metric", CATALOG, ids=lambda metric: metric.name)
def test_name_says_lifecycle_unit_and_type(metric):
    words = metric.name.split("_")
    assert words[0] == "sojourn" and words[1] == metric.lifecycle and metric.lifecycle in OWNERS
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    noun = metric.name.removesuffix("_total")
    if metric.unit in ("seconds", "bytes", "ratio", "tokens", "flops"):
        assert noun.endswith(f"_{metric.unit}")
    assert metric.meaning.endswith(".") and metric.cannot.endswith(".")
    assert not {"model_name", "le", "instance", "job"} & set(metric.labels)
    assert all(len(values) == len(metric.labels) for values in metric.values)


@pytest.mark.parametrize("metric", [m for m in CATALOG if m.kind == "histogram"], ids=lambda metric: metric.name)
def test_buckets_ascend_and_resolve_a_factor_of_two(metric):
    assert len(metric.buckets) >= 24
    ratios = [high / low for low, high in zip(metric.buckets, metric.buckets[1:], strict=False)]
    assert min(ratios) > 1 and max(ratios) <= 2


def test_no_two_metrics_share_a_sample_or_a_family():
    names = [name for metric in CATALOG for name in sample_names(metric)]
    assert len(names) == len(set(names))
    families = [metric.name.removesuffix("_total") for metric in CATALOG]
    assert len(families) == len(set(families)) == len(METRIC_BY_NAME)


def test_every_objective_of_a_server_has_its_latency():
    for objective in SERVER_OBJECTIVES:
        assert f"sojourn_request_{objective.removesuffix('_ms')}_seconds" in METRIC_BY_NAME


def test_log_buckets_reach_from_first_to_last():
    bounds = log_buckets(0.001, 10, per_decade=6)
    assert bounds[0] == 0.001 and bounds[-1] == 10 and 0.1 in bounds and len(bounds) == 25


def test_page_of_metrics_is_the_catalogue_s():
    assert (DOCS / "metrics.md").read_text(encoding="utf-8") == render_markdown(), (
        "run `python -m sojourn.metrics.catalog.catalog > docs/metrics.md`"
    )
