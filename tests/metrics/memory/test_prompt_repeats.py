"""What prompts repeat at any place, and which of it could stand first."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sojourn.metrics.memory.prompt_repeats import SHINGLE_TOKENS, Allowance, PromptRepeats, stretches

DICE = np.random.default_rng(7)


def drawn(num_tokens: int) -> np.ndarray:
    return DICE.integers(0, 50_000, num_tokens)


def test_a_common_part_is_repeated_and_movable_behind_what_changes():
    part, repeats = drawn(200), PromptRepeats()
    found = [repeats.add(np.concatenate([drawn(10), part, drawn(30)])) for _ in range(4)]
    assert found == [(0, 0), (200, 0), (200, 200), (200, 200)]


def test_what_is_shared_as_a_prefix_is_not_movable():
    part, repeats = drawn(200), PromptRepeats()
    found = [repeats.add(np.concatenate([part, drawn(30)]), shared_tokens=200) for _ in range(3)]
    assert found[2] == (200, 0)


def test_overlaps_of_prompts_that_are_cut_from_one_text_are_repeated_but_not_movable():
    text, repeats = drawn(20_000), PromptRepeats()
    starts = DICE.integers(0, 19_000, 200)
    repeated, movable = np.sum([repeats.add(np.concatenate([drawn(5), text[at : at + 400]])) for at in starts], axis=0)
    assert repeated > 0.5 * 400 * 200
    assert movable < 0.02 * repeated


def test_documents_in_another_order_are_movable():
    documents, repeats = [drawn(100) for _ in range(5)], PromptRepeats()
    found = [
        repeats.add(
            np.concatenate([drawn(8), *(part for at in DICE.permutation(5) for part in (documents[at], drawn(6)))])
        )
        for _ in range(8)
    ]
    assert found[-1] == (500, 500)


def test_a_prompt_shorter_than_a_shingle_and_another_salt_repeat_nothing():
    repeats, text = PromptRepeats(), drawn(40)
    assert repeats.add(text[: SHINGLE_TOKENS - 1]) == (0, 0)
    repeats.add(text)
    assert repeats.add(text, salt=9) == (0, 0)
    assert repeats.add(text) == (40, 0)


def test_an_allowance_takes_a_burst_and_then_a_hundred_prompts_a_second():
    allowance, second = Allowance(), 10**9
    assert sum(allowance.takes(0, 10) for _ in range(200)) == 64
    assert sum(allowance.takes(second * k // 1000, 10) for k in range(1, 10_001)) == 1000
    assert sum(allowance.takes(second * k // 1000, 10_000) for k in range(10_001, 20_001)) < 120
    assert allowance.takes(second * 60, 10**6), "of any length"


def test_a_table_that_is_full_forgets():
    repeats, text = PromptRepeats(remembered=256), drawn(40)
    repeats.add(text)
    repeats.add(drawn(20_000))
    assert repeats.add(text)[0] < 40


@given(st.lists(st.booleans(), max_size=80))
def test_stretches_cover_exactly_the_shingles_that_were_seen(seen):
    covered = np.zeros(len(seen) + SHINGLE_TOKENS, bool)
    for place in np.flatnonzero(seen):
        covered[place : place + SHINGLE_TOKENS] = True
    told = np.zeros_like(covered)
    begins, ends = stretches(np.array(seen, bool))
    for begin, end in zip(begins, ends, strict=True):
        assert not told[begin:end].any() and (begin == 0 or not told[begin - 1]), "stretches touch"
        told[begin:end] = True
    assert (told == covered).all()


@pytest.mark.parametrize("place", [0, 3, 17])
def test_a_place_does_not_matter(place):
    repeats, text = PromptRepeats(), drawn(64)
    repeats.add(text)
    assert repeats.add(np.concatenate([drawn(place), text]))[0] == 64
