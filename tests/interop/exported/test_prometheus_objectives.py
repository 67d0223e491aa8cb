"""What is scraped of objectives, tenants and prices is what the requests met, said and cost."""

import math
import platform
from decimal import Decimal
from importlib.metadata import version

import msgspec
import pytest

from sojourn.interop.exported.prometheus import Exporter
from sojourn.metrics.records import RequestRecord
from tests.interop.exported.scraped_page import OBJECTIVES, fed, scraped, value
from tests.metrics.random_records import MS


def test_objective_is_an_exact_bucket_and_decides_met_or_missed():
    def request(ttft_ms: float, klass: str = "", **changes) -> RequestRecord:
        written = round(ttft_ms * MS)
        base = RequestRecord("r", 0, written, klass=klass, finish_reason="stop", first_written_ns=written)
        return msgspec.structs.replace(base, **changes)

    requests = [
        request(123.456),
        request(123.457),
        request(1, finish_reason=None, error="the core died"),
        request(1, finish_reason="abort"),
        request(1, klass="chat", token_ns=[0, 31 * MS]),  # keeps what "all" asks for, misses its own
        request(200, klass="chat"),  # keeps its own, misses what "all" asks for
        request(1, klass="chat"),
        request(1, klass="a class that nobody declared"),
    ]
    samples = fed(
        [], requests, [{"klass": "all", "ttft_ms": 123.456, "e2e_ms": None}, {"klass": "chat", "tpot_ms": 30}]
    )
    assert value(samples, "request_ttft_seconds_bucket", le="0.123456") == len(requests) - 2

    def counts(klass: str, objective: str) -> list[float]:
        labels = {"klass": klass, "objective": objective}
        return [value(samples, "request_objective_total", outcome=end, **labels) for end in ("met", "missed")]

    assert counts("all", "ttft_ms") == counts("all", "all_objectives") == [2, 3]
    assert counts("chat", "ttft_ms") == counts("chat", "tpot_ms") == [2, 1]
    assert counts("chat", "all_objectives") == [1, 2]


def test_good_tokens_and_tenants_follow_the_verdicts_and_few_names_have_a_series():
    def request(tenant: str, ttft_ms: float, tokens: int, **changes) -> RequestRecord:
        written = round(ttft_ms * MS)
        return RequestRecord(
            "r",
            0,
            written,
            tenant=tenant,
            output_tokens=tokens,
            finish_reason="stop",
            first_written_ns=written,
            **changes,
        )

    objectives = [{"klass": "all", "ttft_ms": 100.0}, {"klass": "chat", "ttft_ms": 10.0}]
    requests = [
        request("a", 50, 7),
        request("a", 150, 11),
        request("", 50, 13, klass="chat"),
        request("a", 5, 17, klass="chat"),
    ]
    samples = fed([], requests, objectives)
    assert [value(samples, "token_good_tokens_total", klass=klass) for klass in ("all", "chat")] == [7, 17]
    by_tenant = {
        (tenant, verdict): value(samples, "request_tenant_requests_total", tenant=tenant, outcome=verdict)
        for tenant in ("a", "(none)") for verdict in ("met", "missed", "unjudged")
    }  # fmt: skip
    assert by_tenant == {("a", "met"): 2, ("a", "missed"): 1, ("a", "unjudged"): 0,
                         ("(none)", "met"): 0, ("(none)", "missed"): 1, ("(none)", "unjudged"): 0}  # fmt: skip
    many = fed([], [request(f"t{number}", 50, 1) for number in range(150)], [])
    tenants = {dict(labels)["tenant"] for name, labels in many if name == "sojourn_request_tenant_requests_total"}
    assert len(tenants) == 101
    assert value(many, "request_tenant_requests_total", tenant="(others)", outcome="unjudged") == 50


def test_prices_are_those_of_the_usage_records_by_tenant():
    exporter = Exporter("tiny", OBJECTIVES)
    exporter.observe_prices({("a", "EUR", "tokens"): Decimal("0.25"), ("b", "EUR", "tokens"): Decimal("0.5")})
    exporter.observe_prices({("a", "EUR", "tokens"): Decimal("0.75"), ("b", "EUR", "tokens"): Decimal("0.5")})
    samples = scraped(exporter)
    assert value(samples, "request_price_total", tenant="a", currency="EUR", basis="tokens") == 0.75
    assert value(samples, "request_price_total", tenant="b", currency="EUR", basis="tokens") == 0.5


def test_request_with_an_error_has_failed_whatever_its_finish_reason_says():
    samples = fed([], [RequestRecord("r", 0, 1, finish_reason="stop", error="the socket closed", written_ns=1)])
    assert value(samples, "request_finished_total", outcome="error") == 1
    assert value(samples, "request_e2e_seconds_count") == 0


@pytest.mark.parametrize(
    ("objectives", "sentence"),
    [
        ([{"klass": "chat", "itl_ms": 5}], r"'chat': 'itl_ms' is unknown; give ttft_ms, tpot_ms, e2e_ms"),
        ([{"ttft_ms": 0}], r"'all': ttft_ms is 0; give milliseconds above 0"),
        ([{"ttft_ms": "fast"}], r"ttft_ms is 'fast'"),
        ([{"ttft_ms": math.nan}], r"ttft_ms is nan"),
        ([{"ttft_ms": True}], r"ttft_ms is True"),
    ],
)
def test_objective_that_cannot_be_meant_is_refused_with_a_sentence(objectives, sentence):
    with pytest.raises(ValueError, match=sentence):
        Exporter("tiny", objectives)


def test_objectives_of_every_class_and_the_version_are_on_the_page():
    samples = fed([], [])
    assert value(samples, "request_objective_bound_seconds", klass="all", objective="ttft_ms") == 0.12
    assert value(samples, "request_objective_bound_seconds", klass="chat", objective="tpot_ms") == 0.03
    (labels,) = [labels for name, labels in samples if name == "sojourn_telemetry_build_info"]
    assert dict(labels) == {"version": version("sojourn"), "python": platform.python_version()}
