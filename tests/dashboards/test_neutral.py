"""The recording rules translate each engine's page as the sources do in Python: one truth, two languages."""

import gzip
import math
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from sojourn.dashboards.neutral import FAMILIES, FOREIGN, neutral
from sojourn.dashboards.rules import rules
from sojourn.interop.sources.registry import SOURCES
from sojourn.interop.sources.sglang import SGLANG
from sojourn.interop.sources.source import Source
from sojourn.interop.sources.translate import Growth, key, over_time
from sojourn.interop.sources.vllm import VLLM
from sojourn.metrics.catalog.catalog import METRIC_BY_NAME
from tests.metrics.foreign import SglangPage, VllmPage, steady

pytestmark = [
    pytest.mark.prometheus,
]
RECORDED = Path(__file__).parent / "pages"  # of real servers
TARGET = {"job": "pods", "instance": "10.0.0.7:8000", "namespace": "chat"}


def busy(page: VllmPage | SglangPage, engines: int) -> bytes:
    """A page of some life: each engine served requests that differ in length, queue and preemptions."""
    for number, life in enumerate(steady(24)):
        own = replace(life, engine=number % engines, queue_s=0.1 * (number % 4), cached_tokens=7 * (number % 3),
                      preemptions=number % 2, reason=("stop", "length", "abort")[number % 3])  # fmt: skip
        page.prefilled(own)
        page.finished(own)
    for engine in range(engines):
        page.show(running=3 + engine, waiting=engine, kv_use=0.25 + 0.5 * engine, engine=engine)
    return page.render()


PAGES: dict[str, tuple[Source, Callable[[], bytes]]] = {
    "vllm": (VLLM, lambda: busy(VllmPage(), 1)),
    "vllm, two engines": (VLLM, lambda: busy(VllmPage(engines=2), 2)),
    "vllm 0.32.0, recorded": (VLLM, lambda: gzip.decompress((RECORDED / "vllm-0.32.0.prom.gz").read_bytes())),
    "sglang": (SGLANG, lambda: busy(SglangPage(), 1)),
    "sglang, 2 × 2 ranks that all report, with priorities": (
        SGLANG, lambda: busy(SglangPage([(0, 0), (0, 1), (1, 0), (1, 1)], priorities=True), 2),
    ),
    "sglang, only rank 1 reports": (SGLANG, lambda: busy(SglangPage([(0, 1)]), 1)),
}  # fmt: skip


def samples(page: bytes) -> list[tuple[str, dict[str, str], float]]:
    return [
        (sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
        if not sample.name.endswith("_created") and math.isfinite(sample.value)
    ]


def in_python(source: Source, found: list[tuple[str, dict[str, str], float]]) -> dict[str, float]:
    """Neutral series → value, by `interop.sources.translate`."""
    rows = pd.DataFrame(found, columns=["name", "labels", "growth"]).assign(resets=0, ns=1)
    growth = Growth(source, rows)
    expected = dict(growth.totals())
    for name, distribution in growth.distributions().items():
        expected |= {f"{name}_count": distribution.count, f"{name}_sum": distribution.count * distribution.mean}
    for name, course in over_time(source, "gauge", rows, "growth").items():
        expected[name] = float(course.iloc[0])
    for span in source.spans:
        seconds, requests = growth.total(span.seconds), growth.total(span.requests)
        if seconds is not None and requests is not None:
            where = (("span", span.name),)
            expected |= {key("sojourn_span_seconds_total", where): seconds}
            expected |= {key("sojourn_span_requests_total", where): requests}
    return {neutral(name): value for name, value in expected.items()}


def promtool(folder: Path, series: list[dict], expressions: dict[str, float]) -> subprocess.CompletedProcess:
    """Whether each expression gives its one value after two minutes."""
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules()))
    case = {
        "rule_files": ["rules.yaml"], "evaluation_interval": "15s",
        "tests": [{
            "interval": "1m", "input_series": series,
            "promql_expr_test": [
                {"expr": f"round({expr}, 0.001)", "eval_time": "2m",
                 "exp_samples": [{"labels": "{}", "value": math.floor(value * 1000 + 0.5) / 1000}]}
                for expr, value in expressions.items()
            ],
        }],
    }  # fmt: skip
    (folder / "case.yaml").write_text(yaml.safe_dump(case))
    command = ["promtool", "test", "rules", "case.yaml"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def as_series(found: list[tuple[str, dict[str, str], float]]) -> list[dict]:
    return [
        {"series": key(name, tuple({**labels, **TARGET}.items())), "values": f"{value:g}x4"}
        if value == float(f"{value:g}")
        else {"series": key(name, tuple({**labels, **TARGET}.items())), "values": f"{value!r}x4"}
        for name, labels, value in found
    ]


@pytest.mark.parametrize("page", PAGES)
def test_rules_record_what_the_translation_gives(page, tmp_path):
    source, rendered = PAGES[page]
    found = samples(rendered())
    expected = in_python(source, found)
    assert len(expected) > 20 and sum(map(bool, expected.values())) > 10
    asked = {}
    for name, value in expected.items():
        series, _, labels = name.removesuffix("}").partition("{")
        for suffix in ("_count", "_sum"):  # `name{labels}_count` of a distribution with labels
            series, labels = (
                (series, labels) if not labels.endswith(suffix) else (series + suffix, labels[: -len(suffix) - 1])
            )
        where = ",".join(part for part in (f'engine="{source.key}"', 'namespace="chat"', labels) if part)
        asked[f"sum({series}{{{where}}})"] = value
    done = promtool(tmp_path, as_series(found), asked)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def test_our_server_is_counted_once_where_it_lends_vllm_s_names(tmp_path):
    found = [
        *samples(busy(VllmPage(), 1)),
        ("sojourn_request_running", {"model_name": "m"}, 5.0), ("sojourn_request_waiting", {"model_name": "m"}, 2.0),
    ]  # fmt: skip
    done = promtool(tmp_path, as_series(found), {"sum(llm:request_running)": 5, "sum(llm:request_waiting)": 2})
    assert done.returncode == 0, done.stdout + done.stderr


def test_accounts_of_our_ledger_are_spans(tmp_path):
    account = {"model_name": "m", "lifecycle": "request", "account": "request.queue"}
    found = [
        ("sojourn_request_ledger_seconds_total", account, 6.0),
        ("sojourn_request_finished_total", {"model_name": "m", "outcome": "stop"}, 3.0),
        ("sojourn_request_finished_total", {"model_name": "m", "outcome": "length"}, 1.0),
    ]
    where = '{span="request.queue",engine="sojourn"}'
    asked = {f"sum(llm:span_seconds_total{where})": 6, f"sum(llm:span_requests_total{where})": 4}
    done = promtool(tmp_path, as_series(found), asked)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_family_that_another_engine_tells_is_recorded_for_each_that_tells_it():
    recorded = {(rule["record"], rule["labels"]["engine"]) for rule in rules()["groups"][0]["rules"]}
    for source in FOREIGN:
        for item in source.translations:
            suffix = "_bucket" if METRIC_BY_NAME[item.ours].kind == "histogram" else ""
            scaled = suffix and any(term.scale != 1 for terms in item.theirs for term in terms)
            assert ((neutral(item.ours) + suffix, source.key) in recorded) != scaled
    assert {engine for _, engine in recorded} == {source.key for source in SOURCES}
    assert len(FAMILIES) > 15
