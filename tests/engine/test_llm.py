"""Offline use gives what the loop gives: outputs, streams, aborts, errors."""

import asyncio
import gc
import queue
import signal
import subprocess
import sys
import threading
import weakref
from types import SimpleNamespace

import pytest

from sojourn.engine import LLM, Grammar, SamplingParams
from sojourn.engine.compute.kv_cache import KVCache
from sojourn.engine.config import model_folder
from sojourn.engine.llm import LLMError
from sojourn.engine.messages import Submit
from sojourn.engine.runner.runner import ModelRunner
from sojourn.engine.token.text.tokenizer import Tokenizer
from sojourn.metrics.records import StepRecord
from tests.engine.harness import generate

PROMPTS = ["The queue is", "A cache of", "When the"]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


class Steps:
    """The records of finished steps. `then` is called once, in the engine's thread, when some arrive."""

    def __init__(self):
        self.records: list[StepRecord] = []
        self.then = None

    def __call__(self, records: list[StepRecord]) -> None:
        self.records += records
        then, self.then = self.then, None
        if then is not None:
            then()


@pytest.fixture(scope="module")
def steps():
    return Steps()


@pytest.fixture(scope="module")
def llm(steps):
    with LLM("tiny-model", threads=1, num_kv_blocks=64, max_model_len=256, max_num_seqs=4, on_steps=steps) as made:
        yield made


def is_empty(llm: LLM, steps: Steps) -> bool:
    """Whether nothing is left of earlier requests: a new one is alone in the engine."""
    for _ in range(2):  # the records of the first are there before the second one begins
        llm.generate(["x"], SamplingParams(max_tokens=1))
    last = steps.records[-1]
    return (llm.num_open, len(last.request_ids), last.waiting, last.blocks_active) == (0, 1, 0, 0)


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


def test_an_engine_that_is_closed_at_work_reports_all_its_steps(monkeypatch):
    reported, collected, collect = [], [], ModelRunner.collect
    monkeypatch.setattr(ModelRunner, "collect", lambda *args: collected.append(collect(*args)) or collected[-1])
    llm = LLM("tiny-model", threads=1, num_kv_blocks=64, max_model_len=256, on_steps=reported.extend)

    async def close_at_work():
        with pytest.raises(LLMError, match="closed"):
            async for _ in llm.stream(PROMPTS[0], SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)):
                llm.close()

    asyncio.run(close_at_work())
    assert [record.step for record in reported] == list(range(len(collected))) != []


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


def test_left_stream_is_aborted_and_gives_its_blocks_back(llm, steps):
    async def read_two():
        stream = llm.stream("The", SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True))
        pieces = [await anext(stream), await anext(stream)]
        await stream.aclose()
        return pieces

    assert len(asyncio.run(read_two())) == 2
    assert is_empty(llm, steps)


def test_chat_is_what_the_template_makes_of_it_completed(llm):
    chatted = llm.chat([{"role": "user", "content": "hi"}], GREEDY)
    written = llm.generate("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", GREEDY)[0]
    assert (chatted.prompt_token_ids, chatted.text) == (written.prompt_token_ids, written.text)
    for conversation in ("hi", [[{"role": "user", "content": "hi"}]], [], {"role": "user", "content": "hi"}):
        with pytest.raises(LLMError, match="a conversation is a list of messages"):
            llm.chat(conversation, GREEDY)


def test_stop_string_ends_the_text_before_it(llm):
    text = llm.generate(PROMPTS[:1], GREEDY)[0].text
    stop = text[len(text) // 2 :][:3]
    output = llm.generate(PROMPTS[:1], GREEDY, stop=[stop])[0]
    assert output.finish_reason == "stop" and output.text == text[: text.index(stop)]


def test_temperature_that_only_loses_digits_is_greedy(llm, expected):
    sampling = SamplingParams(max_tokens=12, temperature=1e-310, ignore_eos=True)
    assert [output.token_ids for output in llm.generate(PROMPTS, sampling)] == expected


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
        ([[3]], SamplingParams(max_tokens="many"), "max_tokens"),
        ([[3]], SamplingParams(max_tokens=1, grammar=object()), "sampling of prompt 0"),
        ([[3]], 1, "must be SamplingParams"),
        ([1, 2], GREEDY, "prompt 0 is 1; a prompt is a text or a list of token ids"),
        (["\ud800"], GREEDY, "prompt 0 is no text that UTF-8 can spell"),
        ([[3]], SamplingParams(max_tokens=1, logit_bias={2560: 1.0}), "`logit_bias` holds token id 2560"),
        ([[3]], SamplingParams(max_tokens=1, logit_bias={3: float("nan")}), "logit_bias"),
        ([[3]], SamplingParams(max_tokens=1, bad_words=[[3, -1]]), "`bad_words` holds token id -1"),
        ([[3]], SamplingParams(max_tokens=1, bad_words=[[]]), "a word without tokens"),
        ([[3]], SamplingParams(max_tokens=1, allowed_token_ids=[9999]), "`allowed_token_ids` holds token id 9999"),
        ([[3]], SamplingParams(max_tokens=1, stop_token_ids=[9999]), "`stop_token_ids` holds token id 9999"),
        ([[3]], SamplingParams(max_tokens=1, logprobs=2561), "`logprobs`=2561 is more than"),
        ([[3]], SamplingParams(max_tokens=1, prompt_logprobs=2561), "`prompt_logprobs`=2561 is more than"),
        ([[3]], SamplingParams(max_tokens=1, min_tokens=2), "`min_tokens`=2 is more than `max_tokens`=1"),
        ([[3]], SamplingParams(max_tokens=1, grammar=Grammar("regex", "a"), ignore_eos=True), "`ignore_eos` cannot be"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_a_sentence(llm, prompts, sampling, sentence):
    with pytest.raises(LLMError, match=sentence):
        llm.generate(prompts, sampling)
    assert llm.num_open == 0


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"n": 0}, "n=0"),
        ({"n": 2.5}, "n=2.5"),
        ({"stop": [""]}, "stop string ''"),
        ({"stop": ["a", 5]}, "stop string 5"),
    ],
)
def test_numbers_and_stop_strings_that_mean_nothing_are_refused(llm, more, sentence):
    with pytest.raises(LLMError, match=sentence):
        llm.generate(["x"], GREEDY, **more)


def test_one_stop_string_is_one_and_not_its_characters(llm):
    text = llm.generate(PROMPTS[:1], GREEDY)[0].text
    stop = text[len(text) // 2 :][:3]
    assert llm.generate(PROMPTS[:1], GREEDY, stop=stop)[0].text == text[: text.index(stop)]


def test_request_that_fails_says_why_and_leaves_the_others_alone(llm, expected):
    nothing = SamplingParams(max_tokens=4, allowed_token_ids=[5], bad_words=[[5]])
    hopeless = SamplingParams(max_tokens=4, grammar=Grammar("regex", "("))
    outputs = llm.generate([PROMPTS[0], PROMPTS[0], PROMPTS[1]], [nothing, hopeless, GREEDY])
    assert [output.finish_reason for output in outputs] == ["error", "error", "length"]
    assert "leave no token to draw" in outputs[0].error and "regex" in outputs[1].error
    assert outputs[2].token_ids == expected[1]

    async def read(sampling):
        return [piece async for piece in llm.stream(PROMPTS[0], sampling)]

    for sampling, sentence in ((nothing, "leave no token to draw"), (hopeless, "regex")):
        with pytest.raises(LLMError, match=sentence):
            asyncio.run(asyncio.wait_for(read(sampling), timeout=60))


def test_output_that_its_grammar_ends_without_a_token_ends_with_all_its_text(llm):
    """The model's end token is forbidden, so that only the grammar can say that nothing may follow."""
    ends = Tokenizer(model_folder("tiny-model")).stop_token_ids
    sampling = SamplingParams(max_tokens=9, grammar=Grammar("regex", "ab"), bad_words=[[token] for token in ends])
    output = llm.generate(["x"], sampling, stop=["bc"])[0]
    assert (output.finish_reason, output.text) == ("stop", "ab")

    async def read():
        return [piece async for piece in llm.stream("x", sampling, stop=["bc"])]

    pieces = asyncio.run(asyncio.wait_for(read(), timeout=60))
    assert "".join(piece.text for piece in pieces) == "ab" and pieces[-1].finish_reason == "stop"


def test_reader_whose_event_loop_is_closed_is_given_up_and_hurts_nobody(llm, steps, expected):
    loop = asyncio.new_event_loop()
    stream = llm.stream("The", SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True))
    loop.run_until_complete(anext(stream))
    loop.close()
    assert llm.generate(PROMPTS[:1], GREEDY)[0].token_ids == expected[0]
    assert is_empty(llm, steps)


def test_interrupt_from_the_keyboard_gives_up_what_is_under_way(llm, steps, expected):
    steps.then = lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["The"] * 8, SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True), n=3)
    assert llm.generate(PROMPTS[:1], GREEDY)[0].token_ids == expected[0]
    assert is_empty(llm, steps)


def test_settings_of_a_server_and_unknown_ones_are_refused():
    with pytest.raises(LLMError, match="setting port is of a server"):
        LLM("tiny-model", port=1)
    with pytest.raises(LLMError, match="setting seed is of a server"):
        LLM("tiny-model", seed=1)
    with pytest.raises(LLMError, match="setting otlp_endpoint is of a server"):
        LLM("tiny-model", otlp_endpoint="http://127.0.0.1:4318")
    with pytest.raises(LLMError, match="setting faults is of a server"):
        LLM("tiny-model", faults="slow_host:ms=1")
    with pytest.raises(LLMError, match="setting tool_format is of a server"):
        LLM("tiny-model", tool_format="hermes")
    with pytest.raises(LLMError, match="setting moderation is of a server"):
        LLM("tiny-model", moderation="checks.yaml")
    with pytest.raises(LLMError, match="setting allowed_hosts is of a server"):
        LLM("tiny-model", allowed_hosts="*")
    with pytest.raises(LLMError, match="block_size=0"):
        LLM("tiny-model", block_size=0)
    with pytest.raises(LLMError, match="max_seqs is not a setting of the engine; did you mean max_num_seqs"):
        LLM("tiny-model", max_seqs=4)
    with pytest.raises(LLMError, match="priority_ageing=5 is not valid: only policy=priority uses it"):
        LLM("tiny-model", priority_ageing=5)


def test_the_engine_is_built_in_the_thread_that_runs_it(monkeypatch):
    """A GPU's libraries have a handle and memory for each thread that uses them."""
    threads, make, launch = [], ModelRunner.__init__, ModelRunner.launch

    def watched(method):
        return lambda *args: threads.append(threading.get_ident()) or method(*args)

    monkeypatch.setattr(ModelRunner, "__init__", watched(make))
    monkeypatch.setattr(ModelRunner, "launch", watched(launch))
    with LLM("tiny-model", threads=1, num_kv_blocks=64, max_model_len=256) as llm:
        llm.generate("The queue", SamplingParams(max_tokens=2, temperature=0.0))
    assert len(threads) > 2 and len(set(threads)) == 1 and threads[0] != threading.get_ident()


def test_engine_that_fails_tells_everybody_who_waits(monkeypatch):
    with LLM("tiny-model", threads=1, num_kv_blocks=16, max_model_len=64) as llm:

        def fail(runner, plan):
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(ModelRunner, "launch", fail)
        for _ in range(2):
            with pytest.raises(LLMError, match="the device is gone"):
                llm.generate(["x"], GREEDY)


def test_closed_engine_takes_no_more():
    def caches() -> list[KVCache]:
        gc.collect()
        return [thing for thing in gc.get_objects() if type(thing) is KVCache]

    earlier = caches()  # of other tests: held, so that their memory is nobody else's
    llm = LLM("tiny-model", threads=1, num_kv_blocks=16, max_model_len=64)
    own = [weakref.ref(each) for each in caches() if not any(each is other for other in earlier)]
    assert own
    llm.close()
    llm.close()
    gc.collect()
    assert not any(each() for each in own), "the memory was not given back"
    with pytest.raises(LLMError, match="closed"):
        llm.generate(["x"], GREEDY)


def test_engine_that_is_closed_while_a_request_is_handed_over_leaves_nobody_waiting(monkeypatch):
    class ClosedBefore(queue.SimpleQueue):
        """A queue to an engine that ends before the first request is in it."""

        def put(self, item):
            if isinstance(item, Submit):
                llm.close()
            super().put(item)

    monkeypatch.setattr("sojourn.engine.llm.queue", SimpleNamespace(SimpleQueue=ClosedBefore, Empty=queue.Empty))
    llm = LLM("tiny-model", threads=1, num_kv_blocks=16, max_model_len=64)
    with pytest.raises(LLMError, match="closed"):
        llm.generate(["x"], GREEDY)


@pytest.mark.server
def test_program_that_ends_without_closing_its_engine_ends_as_it_should():
    code = """
import threading
from sojourn.engine import LLM, SamplingParams
stepped = threading.Event()
llm = LLM("tiny-model", threads=1, num_kv_blocks=64, max_model_len=1024, on_steps=lambda records: stepped.set())
sampling = SamplingParams(max_tokens=1000, ignore_eos=True)
threading.Thread(target=llm.generate, args=(["a"], sampling), daemon=True).start()
stepped.wait()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_close_tells_those_who_wait():
    steps = Steps()
    steps.then = lambda: threading.Thread(target=llm.close).start()
    llm = LLM("tiny-model", threads=1, num_kv_blocks=64, max_model_len=1024, on_steps=steps)
    with pytest.raises(LLMError, match="closed"):
        llm.generate(["x"] * 3, SamplingParams(max_tokens=1000, ignore_eos=True))
    llm.close()


def test_progress_shows_what_is_done(llm, capsys):
    llm.generate(PROMPTS, GREEDY, progress=True)
    shown = capsys.readouterr().out
    assert "3/3" in shown and "tokens/s" in shown
