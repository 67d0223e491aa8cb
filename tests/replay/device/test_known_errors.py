"""The error that an answer carries: of the nearest cell, and of differences together."""

import math

import pytest

from sojourn.replay.device import known_errors
from sojourn.replay.device.estimate import Deployment
from sojourn.replay.device.known_errors import ANY, Cell, Judged, RatioCell, known_error, ratio_error, write_judged

LLAMA = Deployment(model="meta-llama/Llama-3.1-70B", device="h100_sxm", weight_format="fp8", tensor_parallel=4)


def cell(model, device, weights, p90):
    return Cell(model=model, device=device, backend="vllm", weight_format=weights, degrees=(2, 4),
                measurements=9, median=0.1, p90=p90, bias=0.0, low=0.8, high=1.2)  # fmt: skip


def ratio(kind, first, second, low, high):
    return RatioCell(kind=kind, first=first, second=second, backend=ANY, measurements=9, median=0.03, p90=0.04, low=low,
                     high=high)  # fmt: skip


@pytest.fixture
def judged(tmp_path, monkeypatch):
    monkeypatch.setattr(known_errors, "FILE", tmp_path / "known.json")
    known_errors._judged.cache_clear()
    cells = [cell("Llama-3.1-70B", "h100_sxm", "fp8", 0.1), cell(ANY, "h100_sxm", "fp8", 0.2),
             cell(ANY, "h100_sxm", ANY, 0.3), cell(ANY, ANY, ANY, 0.4)]  # fmt: skip
    ratios = [ratio("device", "h100_sxm", "h200_sxm", 0.9, 1.1), ratio("tensor_parallel", ANY, ANY, 0.8, 1.2),
              ratio("device", "h100_sxm", "b300_sxm", 0.3, 0.5)]  # fmt: skip
    write_judged({"kernels": Judged(cells=cells, ratios=ratios)}, known_errors.FILE)
    yield
    known_errors._judged.cache_clear()


@pytest.mark.parametrize(
    ("fields", "p90"),
    [({}, 0.1), ({"model": "Qwen3-32B"}, 0.2), ({"weight_format": "bf16"}, 0.3), ({"device": "a100_sxm"}, 0.4)],
)
def test_the_nearest_cell_speaks(judged, fields, p90):
    found = known_error(Deployment(**{**{n: getattr(LLAMA, n) for n in LLAMA.__struct_fields__}, **fields}), "kernels")
    assert (None if found is None else found.p90) == p90
    assert known_error(LLAMA, "roofline") is None


def test_a_cell_names_the_devices_of_its_measurements(judged):
    for degree in (2, 8):
        asked = Deployment(model="Llama-3.1-70B", device="h100_sxm", weight_format="fp8", tensor_parallel=degree)
        found = known_error(asked, "kernels")
        assert found.cell == "Llama-3.1-70B, h100_sxm, vllm, fp8, 2 or 4 devices"
        assert found.has_degree == (degree == 2)


def test_several_differences_are_wrong_together(judged):
    def error(**fields):
        after = Deployment(**{**{n: getattr(LLAMA, n) for n in LLAMA.__struct_fields__}, **fields})
        return ratio_error(LLAMA, after, "kernels")

    assert error() is None
    one, both = error(device="h200_sxm"), error(device="h200_sxm", tensor_parallel=8)
    assert (one.low, one.high) == (pytest.approx(0.9), pytest.approx(1.1))
    assert both.p90 == pytest.approx(math.hypot(0.04, 0.04))
    assert (both.low, both.high) == (pytest.approx(0.7775, abs=1e-4), pytest.approx(1.2223, abs=1e-4))


def test_a_biased_cell_keeps_the_side_of_its_bounds(judged):
    after = Deployment(model="Llama-3.1-70B", device="b300_sxm", weight_format="fp8", tensor_parallel=4)
    found = ratio_error(LLAMA, after, "kernels")
    assert (found.low, found.high) == (pytest.approx(0.3), pytest.approx(0.5))


def test_the_file_of_the_bench_is_read():
    assert known_error(LLAMA, "kernels").measurements > 8
    assert ratio_error(LLAMA, Deployment(model="Llama-3.1-70B", device="h200_sxm", weight_format="fp8",
                                         tensor_parallel=4), "kernels").median < 0.05  # fmt: skip
