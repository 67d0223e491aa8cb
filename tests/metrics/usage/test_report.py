"""Sums of usage records, the times that bound them, and their prices."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal

import msgspec
import pytest

from sojourn.metrics.errors import InputError
from sojourn.metrics.usage.price_list import load_price_list
from sojourn.metrics.usage.record import UsageRecord
from sojourn.metrics.usage.report import GROUPS, between, moment, summed, total

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)
LIST = """
currency: EUR
models:
  tiny-model:
    input: 0.1
    cached_input: 0.03
    output: 0.3
    device_second: 0.002
    adapters: {legal: {input: 1}}
  "*": {input: 2}
"""


def call(number: int, **known) -> UsageRecord:
    fields = {"model": "tiny-model", "status": "answered", "prompt_tokens": 1000, "cached_tokens": 400,
              "output_tokens": 50, "device_ms": 250.0}  # fmt: skip
    return UsageRecord(call=f"a-{number}", request_id=str(number), time=NOON + timedelta(hours=number),
                       **(fields | known))  # fmt: skip


@pytest.fixture
def prices(tmp_path):
    file = tmp_path / "prices.yaml"
    file.write_text(LIST)
    return load_price_list(file)


def test_a_call_costs_its_tokens_and_its_device_time_exactly(prices):
    priced = prices.priced(call(1))
    assert priced.price_of_tokens == Decimal("0.000087")  # (600 * 0.1 + 400 * 0.03 + 50 * 0.3) / 1,000,000
    assert priced.price_of_device == Decimal("0.0005") and priced.currency == "EUR"
    assert prices.priced(call(1, adapter="legal")).price_of_tokens == Decimal("0.001")  # cached costs what input does
    assert prices.priced(call(1, adapter="other")) == msgspec.structs.replace(priced, adapter="other")
    assert prices.priced(call(1, model="big")).price_of_tokens == Decimal("0.002")
    assert prices.priced(call(1, device_ms=None)).price_of_device is None


def test_only_calls_of_a_charged_status_cost_something(prices):
    for status, is_charged in (("answered", True), ("cancelled", True), ("failed", False), ("interrupted", False)):
        priced = prices.priced(call(1, status=status))
        assert (priced.price_of_tokens > 0) == (priced.price_of_device > 0) == is_charged


def test_a_model_without_a_price_has_none(prices):
    unknown = msgspec.structs.replace(prices, models={"other": prices.models["*"]})
    assert unknown.priced(call(1)).price_of_tokens is None


@pytest.mark.parametrize(("text", "says"), [
    ("currency: EUR", "models"), ("currency: EUR\nmodels: {a: {input: -1}}", "models.a.input is -1"),
    ("currency: EUR\nmodels: {a: {input: NaN}}", "models.a.input is NaN"),
    ("currency: EUR\nmodels: {a: {inptu: 1}}", "inptu"), ("currency: EUR\nmodels: {a: {input: x}}", "decimal"),
    ("currency: EUR\nmodels: {a: {adapters: {b: {output: -2}}}}", r"a\.adapters\.b\.output is -2"),
    ("currency: EUR\nmodels: {}\ncharged: [ok]", "'ok' is no status"), ("- 1", "object"), ("{", "is not one"),
])  # fmt: skip
def test_a_bad_price_list_is_refused_with_a_sentence(tmp_path, text, says):
    (tmp_path / "prices.yaml").write_text(text)
    with pytest.raises(InputError, match=says):
        load_price_list(tmp_path / "prices.yaml")
    with pytest.raises(InputError, match="cannot be read"):
        load_price_list(tmp_path / "none.yaml")


def test_rows_of_each_grouping_sum_to_the_total(prices):
    records = [
        prices.priced(call(number, tenant=tenant, status=status, joules=None if number else 2.5))
        for number, (tenant, status) in enumerate([("a", "answered"), ("a", "failed"), ("", "open"), ("b", "answered")])
    ]
    whole = total(records)
    assert whole.calls == 4 and whole.prompt_tokens == 4000 and whole.device_ms == 1000 and whole.joules == 2.5
    assert whole.calls_with_joules == 1 and whole.by_status == {"answered": 2, "failed": 1, "open": 1}
    for by in GROUPS:
        rows = summed(records, by)
        for name in ("calls", "prompt_tokens", "output_tokens", "device_ms", "price_of_tokens", "price_of_device"):
            assert sum(getattr(row, name) for row in rows) == getattr(whole, name)
    assert [row.group for row in summed(records, "tenant")] == ["(none)", "a", "b"]
    assert [row.group for row in summed(records, "status")] == ["answered", "failed", "open"]


def test_two_currencies_are_not_added_up(prices):
    priced = prices.priced(call(1))
    with pytest.raises(InputError, match="EUR and in USD"):
        total([priced, msgspec.structs.replace(priced, currency="USD")])


def test_a_span_includes_its_begin_and_excludes_its_end():
    records = [call(number) for number in range(3)]
    chosen = between(records, NOON + timedelta(hours=1), NOON + timedelta(hours=2))
    assert [record.request_id for record in chosen] == ["1"]
    assert between(records, None, None) == records


@pytest.mark.parametrize(("text", "expected"), [
    ("2026-11-23", datetime(2026, 11, 23, tzinfo=UTC)),
    ("2026-11-23T10:30", datetime(2026, 11, 23, 10, 30, tzinfo=UTC)),
    ("2026-11-23T10:30+02:00", datetime(2026, 11, 23, 8, 30, tzinfo=UTC)), ("90m", NOON - timedelta(minutes=90)),
    ("7d", NOON - timedelta(days=7)),
])  # fmt: skip
def test_moments_are_times_in_utc_or_ages(text, expected):
    assert moment(text, "--since", NOON) == expected


@pytest.mark.parametrize("text", ["yesterday", "7w", "-1h", "2026-13-01", "", "999999d"])
def test_other_moments_are_refused(text):
    with pytest.raises(InputError, match=r"--since .* is no time"):
        moment(text, "--since")
