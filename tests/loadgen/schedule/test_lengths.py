"""Drawn lengths have the mean and the quantiles that their distribution promises, and keep their bounds."""

import math

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from sojourn.loadgen.errors import ScenarioError
from sojourn.loadgen.scenario.distributions import Length
from sojourn.loadgen.schedule.draws import draw_length
from tests.loadgen.trace_files import write

DRAWS = 4000
WIDE = {"min_tokens": 1, "max_tokens": 100_000}


def length(**said):
    return TypeAdapter(Length).validate_python(said)


def sample_lengths(seed: int = 0, field: str = "prompt_tokens", traced: int | None = None, **said) -> np.ndarray:
    rng, chosen = np.random.default_rng(seed), length(**said)
    return np.array([draw_length(chosen, traced, rng, field) for _ in range(DRAWS)])


def quantiles(sample: np.ndarray) -> list[float]:
    return [float(value) for value in np.quantile(sample, [0.1, 0.5, 0.9])]


def test_normal_has_its_mean_and_its_quantiles():
    sample = sample_lengths(distribution="normal", mean_tokens=1000, stddev_tokens=100, **WIDE)
    error = 100 / math.sqrt(DRAWS)
    assert sample.mean() == pytest.approx(1000, abs=5 * error)
    assert sample.std() == pytest.approx(100, rel=0.06)
    beyond = float((abs(sample - 1000) > 200).mean())  # two standard deviations: 4.55 %, the tails that a bell has
    assert beyond == pytest.approx(0.0455, abs=5 * math.sqrt(0.0455 / DRAWS))
    # the standard error of the 10 % quantile of a normal is 1.71 times that of the mean
    assert quantiles(sample) == pytest.approx([1000 - 128.16, 1000, 1000 + 128.16], abs=5 * 1.71 * error)


def test_zipf_halves_with_the_rank_at_exponent_one_and_has_the_mean_of_its_table():
    sample = sample_lengths(distribution="zipf", exponent=1.0, min_tokens=10, max_tokens=109)
    ranks = np.arange(1, 101)
    shares = (1 / ranks) / (1 / ranks).sum()
    expected = (shares * (ranks + 9)).sum()
    spread = math.sqrt((shares * (ranks + 9 - expected) ** 2).sum() / DRAWS)
    assert sample.mean() == pytest.approx(expected, abs=5 * spread)
    counts = [int((sample == 9 + rank).sum()) for rank in (1, 2, 4)]
    for rank, count in zip((1, 2, 4), counts, strict=True):
        assert count == pytest.approx(DRAWS * shares[rank - 1], abs=5 * math.sqrt(DRAWS * shares[rank - 1]))
    assert sample.min() == 10 and sample.max() <= 109


def test_around_takes_every_length_of_its_range_as_vllm_does():
    sample = sample_lengths(distribution="around", tokens=10, ratio=0.25)
    assert set(sample) == set(range(7, 14))  # floor(7.5) to ceil(12.5)
    assert max(np.bincount(sample)[7:]) < 1.25 * min(np.bincount(sample)[7:])
    assert set(sample_lengths(distribution="around", tokens=10, ratio=0)) == {10}


def test_histogram_is_drawn_by_its_weights():
    sample = sample_lengths(distribution="empirical", histogram={100: 1, 300: 2, 7: 1, 50: 0}, **WIDE)
    assert {size: round(float((sample == size).mean()), 1) for size in (7, 100, 300)} == pytest.approx(
        {7: 0.25, 100: 0.25, 300: 0.5}, abs=0.06
    )
    assert set(sample) == {7, 100, 300}


def test_lengths_of_a_file_are_those_of_its_prompts_or_of_its_outputs(tmp_path):
    file = str(write(tmp_path, "burst8.csv"))
    assert set(sample_lengths(distribution="empirical", file=file, **WIDE)) == {472, 1087}
    assert set(sample_lengths(distribution="empirical", file=file, field="output_tokens", **WIDE)) == {18, 230}
    silent = tmp_path / "silent.jsonl"
    silent.write_text('{"prompt_tokens": 4}')
    with pytest.raises(ScenarioError, match=r"silent\.jsonl tells no output_tokens"):
        sample_lengths(distribution="empirical", file=str(silent), field="output_tokens", **WIDE)


@pytest.mark.parametrize(
    "said",
    [
        {"distribution": "normal", "mean_tokens": 50, "stddev_tokens": 50},
        {"distribution": "lognormal", "median_tokens": 50, "sigma": 2},
        {"distribution": "zipf", "exponent": 0.5},
        {"distribution": "uniform"},
        {"distribution": "empirical", "histogram": {1: 1, 1000: 1}},
        {"distribution": "trace"},
    ],
)
def test_bounds_hold_and_one_draw_is_taken_whatever_the_distribution(said):
    chosen, rng, other = length(**said, min_tokens=40, max_tokens=60), *(np.random.default_rng(5) for _ in range(2))
    sample = [draw_length(chosen, 55, rng) for _ in range(500)]
    other.random(500)
    assert min(sample) >= 40 and max(sample) <= 60
    assert rng.random() == other.random()


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"distribution": "zipf", "exponent": 1, "min_tokens": 1, "max_tokens": 1_000_001},
         "has 1000001 different lengths; at most 1,000,000 fit"),
        ({"distribution": "empirical", **WIDE}, "needs histogram or file, one of the two"),
        ({"distribution": "empirical", "histogram": {1: 1}, "file": "x", **WIDE}, "needs histogram or file, one of"),
        ({"distribution": "empirical", "histogram": {5: 0}, **WIDE}, "weights are all 0"),
        ({"distribution": "empirical", "histogram": {0: 1}, **WIDE}, "greater than or equal to 1"),
        ({"distribution": "around", "tokens": 5, "ratio": 1}, "less than 1"),
        ({"distribution": "normal", "mean_tokens": 5, "stddev_tokens": 0, **WIDE}, "greater than 0"),
    ],
)  # fmt: skip
def test_length_that_cannot_be_drawn_is_refused(said, sentence):
    with pytest.raises(ValidationError, match=sentence):
        length(**said)


def test_zipf_of_exactly_the_largest_table_is_taken():
    assert length(distribution="zipf", exponent=1, min_tokens=1, max_tokens=1_000_000).bounds == (1, 1_000_000)
