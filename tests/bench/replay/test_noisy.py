"""The pairs beside a neighbour: each part of the list has all kinds, and the page counts what held."""

from random import Random

import pytest

from bench.replay.noisy.judge import FIGURES, Judged, coverage, markdown
from bench.replay.noisy.pairs import KINDS, NOISES, RUN_SECONDS, NoisyPair, busy_spells, noisy_pairs
from sojourn.metrics.prediction import Interval
from sojourn.replay.disturbance import Disturbance


def test_any_fifteen_pairs_have_every_kind_beside_every_neighbour():
    pairs = noisy_pairs(40)
    assert len({(pair.kind, pair.noise) for pair in pairs[7:22]}) == len(KINDS) * len(NOISES)
    assert len({pair.name for pair in pairs}) == 40


@pytest.mark.parametrize(("noise", "busy_s"), [("none", 0.0), ("whole", RUN_SECONDS), ("half", RUN_SECONDS / 2)])
def test_a_neighbour_works_as_long_as_its_name_says(noise, busy_s):
    for seed in range(20):
        now_s = busy = 0.0
        for pause, work in busy_spells(noise, Random(seed)):
            busy += max(0.0, min(now_s + pause + work, RUN_SECONDS) - min(now_s + pause, RUN_SECONDS))
            now_s += pause + work
        assert busy == pytest.approx(busy_s)


def test_bursts_take_half_of_the_time_in_the_mean():
    spells = [each for seed in range(50) for each in busy_spells("bursts", Random(seed))]
    pauses, works = (sum(part) for part in zip(*spells, strict=True))
    assert works / (pauses + works) == pytest.approx(0.5, abs=0.05)


def judged(number: int, measured: float, *, is_open: bool = False) -> Judged:
    said = dict.fromkeys(FIGURES.values(), Interval(0.4, 0.5, 0.6))
    return Judged(
        pair=NoisyPair(number, "larger batch", "half"), before=dict.fromkeys(FIGURES.values(), 0.2), said=said,
        at_speed=None, measured=dict.fromkeys(FIGURES.values(), measured), is_open=is_open,
        disturbance=Disturbance(waiting=0.3), longer=1.2, requests=50,
    )  # fmt: skip


def test_the_page_counts_what_held_by_halves_and_without_what_was_open():
    found = [judged(0, 0.5), judged(21, 0.9), judged(2, 0.61), judged(23, 0.9, is_open=True)]
    assert coverage(found, "attainment") == (2, 4) and coverage(found, "attainment", at_speed=True) == (0, 0)
    page = markdown(found, "command", "machine", "day", "")
    assert "| attainment | 2 of 3 (67%) | 2 of 2 (100%) | 0 of 1 (0%) | 20 points |" in page
    assert "| attainment, with *open* ones | 2 of 4 (50%) | 2 of 2 (100%) | 0 of 2 (0%) | 20 points |" in page
    assert "1 of 4 predictions are" in page and "**missed**" in page
