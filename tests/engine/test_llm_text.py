"""The texts of offline use: those of the server, by the same code, for any ids."""

import asyncio

import pytest

from sojourn.engine import LLM, SamplingParams
from sojourn.engine.llm import LLMError
from sojourn.engine.server.openai.structured_output import choice
from sojourn.engine.token.text.stream import TextStream
from tests.engine.token.text.kinds import byte_fallback_model

HELLO, WORD = 263, 265  # "▁hello", "▁the"
NEWLINE, HALF = 3 + 0x0A, 3 + 0xE6


@pytest.fixture(scope="module")
def bytes_llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    byte_fallback_model(folder)
    with LLM(str(folder), load_format="dummy") as llm:
        yield llm


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny-model") as llm:
        yield llm


def sampling(*allowed, **more):
    return SamplingParams(
        **({"max_tokens": 12, "temperature": 2.0, "ignore_eos": True} | more), allowed_token_ids=allowed
    )


def test_half_characters_end_nothing(bytes_llm):
    decode = bytes_llm._tokenizer.decode
    prompts = ["a"] * 20
    wanted = [sampling(NEWLINE, HALF, WORD, seed=seed) for seed in range(20)]
    for done in bytes_llm.generate(prompts, wanted):
        whole = decode(done.prompt_token_ids + done.token_ids)
        assert done.text == whole[len(decode(done.prompt_token_ids)) :] and done.error is None
    assert bytes_llm.generate("a", sampling(HELLO, max_tokens=1))[0].text == " hello"


def test_the_first_blank_is_there_and_stop_strings_see_it(bytes_llm):
    assert bytes_llm.generate("a", sampling(HELLO, max_tokens=2))[0].text == " hello hello"
    assert bytes_llm.generate([[1]], sampling(HELLO, max_tokens=2))[0].text == "hello hello", "no text stands before it"
    done = bytes_llm.generate("a", sampling(HELLO, max_tokens=3), stop=" hello")[0]
    assert (done.text, len(done.token_ids), done.finish_reason) == ("", 1, "stop")
    done = bytes_llm.generate("a", sampling(NEWLINE, max_tokens=3), stop="\n\n")[0]
    assert (done.text, len(done.token_ids)) == ("", 2)


@pytest.mark.parametrize("prompt", ["a", [1]])
def test_an_output_of_a_grammar_is_what_the_grammar_allows(bytes_llm, prompt):
    options = [" hello", "  the", "o"]
    wanted = [SamplingParams(max_tokens=9, seed=seed, grammar=choice(options)) for seed in range(6)]
    assert {done.text for done in bytes_llm.generate([prompt] * 6, wanted)} <= set(options)


def test_stop_strings_and_stop_tokens_wait_for_min_tokens_and_are_hidden(llm):
    greedy = {"max_tokens": 20, "temperature": 0.0}
    whole = llm.generate("The function returns", SamplingParams(**greedy))[0]
    stop = whole.text[8:11]
    late = llm.generate("The function returns", SamplingParams(**greedy, min_tokens=12), stop=stop)[0]
    assert len(late.token_ids) >= 12
    last = whole.token_ids[5]
    for ignore_eos in (False, True):  # which ignores the model's own end only
        ended = SamplingParams(**greedy, stop_token_ids=[last], ignore_eos=ignore_eos)
        done = llm.generate("The function returns", ended)[0]
        assert done.token_ids == whole.token_ids[: whole.token_ids.index(last) + 1] and done.finish_reason == "stop"
        assert done.text == llm._tokenizer.decode(done.token_ids[:-1])


def test_a_fault_in_one_text_is_the_error_of_that_output(llm, monkeypatch):
    push, failing = TextStream.push, []

    def fail(stream: TextStream, token_id: int) -> str:
        if not failing:
            failing.append(stream)
        if stream is failing[0]:
            raise ZeroDivisionError("a fault")
        return push(stream, token_id)

    asked = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    right = llm.generate("The", asked)[0].text
    monkeypatch.setattr(TextStream, "push", fail)
    done = llm.generate("The", asked, n=3)
    errors = [each for each in done if each.finish_reason == "error"]
    assert len(errors) == 1 and "the text of this output cannot be made: ZeroDivisionError" in errors[0].error
    assert [each.text for each in done if each not in errors] == [right] * 2
    failing.clear()

    async def read() -> None:
        async for _ in llm.stream("The", asked):
            pass

    with pytest.raises(LLMError, match="cannot be made"):
        asyncio.run(read())
    assert llm.generate("The", asked)[0].text == right
    assert llm.num_open == 0
