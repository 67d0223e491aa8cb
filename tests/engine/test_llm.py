"""Offline use gives what the loop gives: outputs, streams, aborts, errors."""

import asyncio
import threading

import pytest

from engine import LLM, SamplingParams
from engine.llm import LLMError
from tests.engine.harness import generate

PROMPTS = ["The queue is", "A cache of", "When the"]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny-model", threads=1, num_kv_blocks=64, max_model_len=256, max_num_seqs=4) as made:
        yield made


@pytest.fixture(scope="module")
def expected(llm):
    """The greedy tokens of PROMPTS, by the loop itself."""
    ids = [completion.prompt_token_ids for completion in llm.generate(PROMPTS, GREEDY)]
    return generate("tiny-model", ids)[0]


def test_outputs_stand_in_the_order_of_their_prompts_and_equal_the_loop(llm, expected):
    lengths = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in (12, 3, 7)]
    outputs = llm.generate(PROMPTS, lengths)
    assert [output.token_ids for output in outputs] == [expected[0], expected[1][:3], expected[2][:7]]
    assert all(output.finish_reason == "length" and output.text for output in outputs)
    assert all(output.ledger_ms["compute.decode"] > 0 for output in outputs)


def test_stream_gives_the_same_tokens_and_streams_share_the_batch(llm, expected):
    async def one(prompt):
        return [piece async for piece in llm.stream(prompt, GREEDY)]

    async def all_of_them():
        return await asyncio.gather(*map(one, PROMPTS))

    streams = asyncio.run(all_of_them())
    assert [[piece.token_id for piece in pieces] for pieces in streams] == expected
    whole = [output.text for output in llm.generate(PROMPTS, GREEDY)]
    assert ["".join(piece.text for piece in pieces) for pieces in streams] == whole
    assert all([piece.finish_reason for piece in pieces][-2:] == [None, "length"] for pieces in streams)


def test_left_stream_is_aborted_and_gives_its_blocks_back(llm):
    async def read_two():
        stream = llm.stream("The", SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True))
        pieces = [await anext(stream), await anext(stream)]
        await stream.aclose()
        return pieces

    assert len(asyncio.run(read_two())) == 2
    llm.generate(["x"], SamplingParams(max_tokens=1))  # the loop has turned since
    assert not llm._sequences and not llm._engine.scheduler.requests


def test_stop_string_ends_the_text_before_it(llm):
    text = llm.generate(PROMPTS[:1], GREEDY)[0].text
    stop = text[len(text) // 2 :][:3]
    output = llm.generate(PROMPTS[:1], GREEDY, stop=[stop])[0]
    assert output.finish_reason == "stop" and output.text == text[: text.index(stop)]


def test_n_outputs_differ_and_the_first_is_the_one_asked_for_alone(llm):
    sampling = SamplingParams(max_tokens=8, seed=5, ignore_eos=True)
    alone = llm.generate(PROMPTS[:2], sampling)
    several = llm.generate(PROMPTS[:2], sampling, n=3)
    assert [several[0].token_ids, several[3].token_ids] == [output.token_ids for output in alone]
    assert len({tuple(output.token_ids) for output in several[:3]}) == 3


def test_callers_in_threads_get_their_own_outputs(llm, expected):
    results = {}

    def ask(index):
        results[index] = llm.generate([PROMPTS[index]], GREEDY)[0].token_ids

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[index] for index in range(3)] == expected


@pytest.mark.parametrize(
    ("prompts", "sampling", "sentence"),
    [
        ([""], GREEDY, "prompt 0 is empty"),
        ([[1], [99_999]], GREEDY, "prompt 1 holds token id 99999"),
        ([[True]], GREEDY, "holds token id True"),
        ([[3] * 250], GREEDY, "prompt 0 has 250 tokens and max_tokens is 12, but both together may be at most 256"),
        ([[3], [4]], [GREEDY], "2 prompts need as many"),
        ([[3]], SamplingParams(max_tokens=0), "max_tokens"),
        ([[3]], SamplingParams(max_tokens=1, temperature=-1.0), "temperature"),
        ([[3]], SamplingParams(max_tokens=1, top_p=float("nan")), "top_p"),
        ([[3]], SamplingParams(max_tokens=1, top_k="many"), "top_k"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_a_sentence(llm, prompts, sampling, sentence):
    with pytest.raises(LLMError, match=sentence):
        llm.generate(prompts, sampling)
    assert not llm._sequences


def test_settings_of_a_server_and_unknown_ones_are_refused():
    with pytest.raises(LLMError, match="setting port is of a server"):
        LLM("tiny-model", port=1)
    with pytest.raises(LLMError, match="block_size=0"):
        LLM("tiny-model", block_size=0)


def test_engine_that_fails_tells_everybody_who_waits():
    with LLM("tiny-model", threads=1, num_kv_blocks=16, max_model_len=64) as llm:

        def fail(plan):
            raise RuntimeError("the device is gone")

        llm._engine.runner.launch = fail
        for _ in range(2):
            with pytest.raises(LLMError, match="the device is gone"):
                llm.generate(["x"], GREEDY)


def test_closed_engine_takes_no_more():
    llm = LLM("tiny-model", threads=1, num_kv_blocks=16, max_model_len=64)
    llm.close()
    with pytest.raises(LLMError, match="closed"):
        llm.generate(["x"], GREEDY)


def test_progress_shows_what_is_done(llm, capsys):
    llm.generate(PROMPTS, GREEDY, progress=True)
    shown = capsys.readouterr().out
    assert "3/3" in shown and "tokens/s" in shown
