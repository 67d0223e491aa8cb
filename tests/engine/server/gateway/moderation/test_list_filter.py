"""Streamed moderation by lists: the way a text is cut changes nothing, and nothing that is blocked is shown."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sojourn.engine.server.gateway.moderation.expressions import Expression
from sojourn.engine.server.gateway.moderation.folding import Folding
from sojourn.engine.server.gateway.moderation.list_filter import ListFilter, ListRule
from sojourn.engine.server.gateway.moderation.scanner import matches
from sojourn.engine.server.gateway.moderation.words import WordList
from sojourn.metrics.errors import InputError

WORDS = ["kill", "kill bill", "bi", "ab", "straße", "üb", "日本", "c++"]
LETTERS = "kilb aüB.+日本\n\u200b\u0308SßKeft5-"


def words(*listed: str, **settings) -> WordList:
    return WordList({"bad": listed}, **settings)


def found(listed, text: str) -> list[str]:
    return [text[span.begin : span.end] for span in matches(listed, text)]


def streamed(rules: list[ListRule], text: str, cuts: list[int]) -> tuple[str, bool, int]:
    """What is shown of a text that comes in parts, whether it was blocked, and the most that was held back."""
    output, shown, most_held = ListFilter(rules), "", 0
    ends = sorted({min(cut, len(text)) for cut in cuts})
    for begin, end in zip([0, *ends], [*ends, None], strict=True):
        shown += "".join(segment.shown for segment in output.push(text[begin:end], final=end is None))
        most_held = max(most_held, output.num_held_characters)
        if output.is_blocked:
            break
    return shown, output.is_blocked, most_held


lists = st.one_of(
    st.builds(
        lambda listed, whole, marks: words(*listed, whole_words=whole, ignore_diacritics=marks),
        st.lists(st.sampled_from(WORDS), min_size=1, unique=True), st.booleans(), st.booleans(),
    ),
    st.sampled_from([(r"\d+-\d", 4), (r"\bk\w*b\b", 6), (r"(?i)[ab]{2,}", 3), (r"bi$", 2), (r"k(.*5)?", 8)]).map(
        lambda given: Expression(given[0], "number", given[1])
    ),
)  # fmt: skip
rules = st.lists(st.builds(ListRule, lists, st.sampled_from(["block", "redact", "flag"]), st.just("[x]")), max_size=3)


@settings(max_examples=250)
@given(rules, st.text(LETTERS, max_size=60), st.lists(st.integers(0, 60), max_size=12))
def test_the_parts_in_which_a_text_comes_change_nothing(rules, text, cuts):
    shown, is_blocked, most_held = streamed(rules, text, cuts)
    assert (shown, is_blocked) == streamed(rules, text, [])[:2]
    assert (shown, is_blocked) == streamed(rules, text, list(range(len(text))))[:2]
    holding = [rule.listed for rule in rules if rule.action != "flag"]
    assert most_held <= sum(listed.max_held_characters for listed in holding)
    spans = [(rule, span) for rule in rules for span in matches(rule.listed, text)]
    blocks = [span.begin for rule, span in spans if rule.action == "block"]
    assert is_blocked == bool(blocks)
    if not any(rule.action == "redact" for rule, _ in spans):
        assert shown == text[: min(blocks, default=len(text))]


@settings(max_examples=150)
@given(st.text(LETTERS, max_size=80), st.lists(st.integers(0, 80), max_size=12))
def test_no_word_of_a_list_is_shown_where_it_is_blocked_or_redacted(text, cuts):
    folding, listed = Folding(), words(*WORDS, whole_words=False)
    for action in ("block", "redact"):
        shown, _, _ = streamed([ListRule(listed, action, "*")], text, cuts)
        assert not any(folding.fold(word) in folding.fold(shown) for word in WORDS)


@settings(max_examples=150)
@given(st.text("kilb .\u200b\u0301A1é", max_size=40))
def test_matches_are_those_of_a_plain_search_of_the_folded_text(text):
    folding, listed = Folding(), ["kill", "bi", "ill"]
    folded = folding.fold(text)
    plain = sum(len(re.findall(f"(?={word})", folded)) for word in listed)
    assert len(found(words(*listed, whole_words=False), text)) == plain


@pytest.mark.parametrize(
    ("text", "finds"),
    [
        ("KILL!", ["KILL"]),
        ("skill, killer, kill_", []),
        ("ki\u200bll", ["ki\u200bll"]),
        ("ki" + "\u200b" * 8 + "ll", ["ki" + "\u200b" * 8 + "ll"]),
        ("ki" + "\u200b" * 9 + "ll", []),
        ("ｋｉｌｌ", ["ｋｉｌｌ"]),
        ("kïll", []),
        ("kill\n \tbill", ["kill", "kill\n \tbill"]),
        ("STRASSE", ["STRASSE"]),
        ("U\u0308b", ["U\u0308b"]),
        ("im日本で", ["日本"]),
        ("c++11", ["c++"]),
    ],
)
def test_words_are_found_however_they_are_written(text, finds):
    assert found(words(*WORDS), text) == finds


def test_diacritics_are_ignored_where_the_list_says_so():
    assert found(words("kill", ignore_diacritics=True), "kïll") == ["kïll"]


def test_text_is_held_back_only_while_a_word_may_begin_in_it():
    output = ListFilter([ListRule(words("kill", "kill bill"), "block")])
    shown = ["".join(segment.shown for segment in output.push(part)) for part in ("I ", "sk", "il", " ki", "n, kill")]
    assert shown == ["I ", "sk", "il", " ", "kin, "]
    assert output.push("s!")[0].shown == "kills!" and not output.is_blocked


@pytest.mark.parametrize(("length", "is_found"), [(4, True), (5, True), (6, False)])
def test_a_match_of_an_expression_may_be_as_long_as_it_says(length, is_found):
    assert bool(found(Expression("a+b", "x", 5), "a" * (length - 1) + "b")) == (is_found or length > 5)
    assert found(Expression("ab*c", "x", 5), "a" + "b" * (length - 2) + "c") == (
        ["a" + "b" * (length - 2) + "c"] if is_found else []
    )


def test_an_expression_that_would_stall_other_engines_is_searched_in_linear_time():
    assert found(Expression("(a+)+$", "x", 50), "a" * 20_000 + "b") == []


def test_only_text_that_may_begin_a_match_of_an_expression_is_held_back():
    output = ListFilter([ListRule(Expression(r"\d{3}-\d{2}-\d{4}", "pii", 11), "block")])
    assert output.push("words and words, ")[0].shown == "words and words, "
    assert output.push("123-45") == []
    assert [segment.shown for segment in output.push(" are no number")] == ["123-45 are no number"]


@pytest.mark.parametrize("pattern", ["(", "a*", "(?=a)", "(a)\\1"])
def test_expressions_that_cannot_be_searched_are_refused(pattern):
    with pytest.raises(InputError):
        Expression(pattern, "x", 5)


@pytest.mark.parametrize(("word", "is_good"), [("x" * 200, True), ("x" * 201, False), ("", False), ("\u200b", False)])
def test_words_that_cannot_be_searched_are_refused(word, is_good):
    if is_good:
        words(word)
    else:
        with pytest.raises(InputError):
            words(word)
