"""Prompt lookup without a model: what it would have spared is what a step-by-step run of it spares."""

from hypothesis import given, settings
from hypothesis import strategies as st

from sojourn.engine.techniques.speculation.proposers.ngram_index import NgramIndex, lookup_steps

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


@given(TOKENS, TOKENS, st.integers(1, 5))
@settings(max_examples=60)
def test_lookup_steps_are_those_of_a_run_that_verifies_each_draft(prompt, output, drafts):
    known, index, steps = list(prompt), NgramIndex(4), 0
    index.extend(known)
    while len(known) < len(prompt) + len(output):
        left = output[len(known) - len(prompt) :]
        proposed = index.continuation(drafts) if steps else []
        agreed = 0
        while agreed < min(len(proposed), len(left) - 1) and proposed[agreed] == left[agreed]:
            agreed += 1
        known += left[: agreed + 1]
        index.extend(left[: agreed + 1])
        steps += 1
    assert lookup_steps(prompt + output, len(prompt), drafts=drafts) == steps
    assert steps <= len(output)


def test_text_without_repeats_spares_nothing_and_a_copy_of_the_prompt_nearly_all():
    assert lookup_steps(list(range(100)), 50) == 50
    assert lookup_steps([*range(50), *range(50)], 50) <= 50 / 5 + 4
