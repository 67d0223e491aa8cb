"""The GPUs of a plan: how their words read, and what they cost."""

import pytest

from sojourn.commands.plan_devices import Offers
from sojourn.metrics.errors import InputError
from sojourn.metrics.prediction import Change, Interval, Prediction
from sojourn.replay.device.catalogue import catalogue
from sojourn.replay.device.estimate import Deployment, OutsideTables
from sojourn.replay.device.makers import estimate_of
from sojourn.replay.sizing.estimates import estimate_for
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


@pytest.mark.parametrize(
    "figure", ["bandwidth_gbs = 9000.0", "memory_gib = 60.0", "link_gbs = 9.0", "flops = {bf16 = 9.0}"]
)
def test_figures_of_speed_that_measured_kernels_ignore_are_refused(tmp_path, figure):
    file = tmp_path / "own.toml"
    file.write_text(f"[h100_sxm]\n{figure}\nusd_per_hour = 2.0\n")
    with pytest.raises(InputError, match=f"another {figure.split()[0]} of h100_sxm"):
        Offers("h200_sxm,h100_sxm", file, None)
    Offers("h200_sxm", file, None)
    deployment = Deployment(model="Llama-3.1-8B", device="h100_sxm")
    with pytest.raises(OutsideTables, match=f"another {figure.split()[0]}"):
        estimate_of(deployment, "kernels", catalogue(file))
    made = estimate_for(deployment, catalogue(file))
    assert "peak rates" in made.estimate.provenance and figure.split()[0] in made.why_roofline


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
