"""A word that a pattern is looked for by stands in each of its matches."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sojourn.interop.held.given import Given
from sojourn.interop.held.literals import lines_with, may_match, words_of
from sojourn.interop.held.logs.events import SIGNS
from sojourn.interop.held.logs.vllm_settings import WANTED

PATTERNS = [sign.pattern for sign in SIGNS] + list(WANTED)


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.pattern[:40])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_every_match_has_one_of_the_words(pattern, data):
    text = data.draw(st.from_regex(pattern))
    assert may_match(pattern, text)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(?i)hello", ()), ("a|hello", ()), ("(?:hello)?x", ()), ("(?:hello)+x", ("hello",)), ("h[eo]llo there", (
            "llo there",)), ("x(?:two|six)", ("two", "six")), (r"\d+ tokens", (" tokens",)),
    ],
)  # fmt: skip
def test_optional_parts_and_cases_promise_no_word(pattern, words):
    assert words_of(re.compile(pattern)) == words


def test_the_lines_in_which_a_pattern_matches_are_never_left_out():
    text = "a b\n10 tokens\nnothing\n7 tokens, and hello\nHello"
    lines = Given(text, "x").lines
    for written in (r"\d+ tokens", "hello", "(?i)hello", "a|tokens"):
        pattern = re.compile(written)
        found = [line.number for line in lines_with(lines, [pattern], text) if pattern.search(line.text)]
        assert found == [line.number for line in lines if pattern.search(line.text)]
