"""Stop strings end a text where the text so far holds them, whatever waits for more; places of tokens are exact."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from sojourn.engine.token.text.assembler import TextAssembler
from sojourn.engine.token.text.tokenizer import Tokenizer as OurTokenizer
from tests.engine.token.text.kinds import byte_fallback_model
from tests.engine.token.text.test_stream import TOKENIZERS, ids_of, stream

HELLO = 263  # "▁hello"
KINDS = ["llama", "bundled", "unigram", "word pieces", "suffix"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    byte_fallback_model(folder)
    return OurTokenizer(folder)


def byte(value: int) -> int:
    return 3 + value


def assembled(tokenizer, ids, stops, prompt=(1, 260), **options):
    """(text, tokens that it took, the stop string)"""
    text, shown = TextAssembler(tokenizer.stream(prompt), stops, **options), ""
    for count, token_id in enumerate(ids, 1):
        shown += text.push(token_id)
        if text.stop_string is not None:
            return shown, count, text.stop_string
    return shown + text.rest(), len(ids), text.stop_string


def test_a_newline_that_is_a_byte_ends_the_text_at_once(llama):
    assert assembled(llama, [HELLO, byte(0x0A), HELLO], ["\n"]) == (" hello", 2, "\n")
    assert assembled(llama, [byte(0x0A), byte(0xE6), HELLO], ["\n"]) == ("", 1, "\n")
    assert assembled(llama, [byte(0x0A), byte(0x0A)], ["\n\n"]) == ("", 2, "\n\n")
    assert assembled(llama, [HELLO, byte(0x0A), HELLO], ["o\n h"]) == (" hell", 3, "o\n h")


def test_stop_strings_of_the_first_blank_and_of_replacement_characters_are_found(llama):
    assert assembled(llama, [HELLO], [" hello"]) == ("", 1, " hello")
    assert assembled(llama, [HELLO], [" "], show_stop=True) == (" ", 1, " ")
    assert assembled(llama, [byte(0xE6), HELLO, HELLO], ["\ufffd"]) == ("", 2, "\ufffd")
    assert assembled(llama, [byte(0xE6), byte(0xE6), byte(0xE6)], ["\ufffd\ufffd\ufffd"]) == ("", 3, "\ufffd" * 3)
    assert assembled(llama, [HELLO, byte(0xE6)], ["\ufffd"]) == (" hello", 2, "\ufffd"), "in what an end leaves over"


def test_bytes_that_came_before_min_tokens_are_not_searched(llama):
    ids = [byte(0x0A), byte(0x41), byte(0x0A), byte(0x42)]
    assert assembled(llama, ids, ["\n"], min_tokens=2) == ("\nA", 3, "\n")
    assert assembled(llama, ids, ["\nA"], min_tokens=2) == ("\nA\nB", 4, None)


def test_a_run_of_bytes_that_is_no_text_has_a_place_for_each_of_its_tokens(llama):
    text = TextAssembler(llama.stream((1, 260)))
    for token_id in (260, byte(0xE6), byte(0x97), 1, byte(0xA5), byte(0x0A)):
        text.push(token_id)
    assert text.offsets == [0, 1, 1, 1, 1, 2] and text.num_open == 5, "a character, and a special token inside it"
    text.push(byte(0xFF))
    assert text.offsets == [0, 1, 2, 3, 3, 4, 5] and text.num_open == 0 and text.num_characters == 6


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_ends_at_the_first_stop_string_that_it_holds(kind):
    made: Tokenizer = TOKENIZERS[kind]

    @settings(max_examples=150, database=None)
    @given(
        ids_of(kind),
        st.integers(0, 6),
        st.lists(
            st.sampled_from(
                [" ", "a", "aa", "a a", "\ufffd", "\ufffd\ufffd", "\n", "\n\n", "A\n", " hello", "o a", "日"]
            ),
            min_size=1,
            max_size=2,
        ),
    )
    def check(ids, cut, stops):  # fmt: skip
        prompt, output = ids[:cut], ids[cut:]
        text, shown, count = TextAssembler(stream(kind, prompt), stops), "", 0
        for token_id in output:
            shown, count = shown + text.push(token_id), count + 1
            if text.stop_string is not None:
                break
        shown += "" if text.stop_string is not None else text.rest()
        whole = made.decode(prompt + output[:count])[len(made.decode(prompt)) :]
        begins = [(whole.find(stop), stop) for stop in stops if stop in whole]
        if text.stop_string is None:
            assert shown == whole and not begins
        else:
            assert (len(shown), text.stop_string) == min(begins) and whole.startswith(shown)

    check()


@pytest.mark.parametrize(("value", "stops"), [(0x80, []), (0x0A, []), (0x0A, ["\n" * 30 + "x"]), (0xE6, ["x"])])
def test_a_token_costs_the_same_however_many_bytes_wait(llama, value, stops):
    def seconds(count):
        best = 1e9
        for _ in range(3):
            text, begin = TextAssembler(llama.stream(), stops), time.process_time()
            for _ in range(count):
                text.push(byte(value))
            text.rest()
            best = min(best, time.process_time() - begin)
        return best

    assert seconds(24_000) < 8 * seconds(6_000), "four times the tokens"


def test_a_long_prompt_costs_no_more_than_a_short_one(llama):
    def seconds(count):
        prompt, best = [1, *[260] * count, byte(0x0A)], 1e9
        for _ in range(5):
            begin = time.process_time()
            for _ in range(100):
                llama.stream(prompt)
            best = min(best, time.process_time() - begin)
        return best

    assert seconds(50_000) < 3 * seconds(50)
