"""The GPUs of a plan: how their words read, and what they cost."""

import pytest

from sojourn.commands.plan_devices import Offers
from sojourn.metrics.errors import InputError
from sojourn.metrics.prediction import Change, Interval, Prediction
from sojourn.replay.verdict.plan import Point

KEPT = Interval(0.9, 0.9, 0.9)


def point(tokens_per_s: float) -> Point:
    latencies = {"p50": KEPT}
    said = Prediction(
        change=Change(), attainment=KEPT, goodput_rps=KEPT, ttft_ms=latencies, tpot_ms=latencies, e2e_ms=latencies,
        attainment_by_class={}, output_tokens_per_s=tokens_per_s, preemptions=0, is_trusted=True, doubts=[],
    )  # fmt: skip
    return Point(settings={}, rate=1.0, prediction=said)


def test_words_are_devices_and_how_many_of_them(tmp_path):
    prices = tmp_path / "prices.toml"
    prices.write_text("[h200_sxm]\nusd_per_hour = 4.0\n")
    offers = Offers("h100_sxm, 2xh200_sxm", prices, "a100_sxm")
    one, two = offers.purchases().values()
    assert one.settings == {"device": "h100_sxm", "recorded_device": "a100_sxm"}
    assert two.settings == {"device": "h200_sxm", "tensor_parallel": 2, "recorded_device": "a100_sxm"}
    found = offers.figures("2xh200_sxm", point(1000.0), recorded_count=1)
    assert found["usd_per_hour"] == 8.0 and found["price_source"] == str(prices)
    assert found["usd_per_million_good_output_tokens"] == pytest.approx(8 / 3600 / 900 * 1e6)
    assert found["good_output_tokens_per_joule"] == pytest.approx(900 / 1400)
    assert offers.figures("h100_sxm", point(1000.0), recorded_count=4)["devices"] == 4


def test_a_device_without_a_price_costs_nothing_that_is_known():
    found = Offers("gb200", None, None).figures("gb200", point(1000.0), recorded_count=1)
    assert found["usd_per_hour"] is found["usd_per_million_good_output_tokens"] is None


@pytest.mark.parametrize(
    ("words", "says"),
    [(" ,", "names no device"), ("h1000", "'h1000' is no known device"), ("0xh100_sxm", "give 1 to 64 devices")],
)
def test_words_that_are_no_device_are_refused(words, says):
    with pytest.raises(InputError, match=says):
        Offers(words, None, None)
