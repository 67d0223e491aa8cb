"""Calls with several sequences, and what a call says of its tokens: each form against another way to ask the same."""

import asyncio
import json
from statistics import fmean

import httpx
import pytest

from sojourn.engine.config import EngineConfig
from sojourn.engine.server.core.client import CoreClient
from sojourn.engine.server.core.spare import Spare
from sojourn.engine.server.errors import ApiError
from sojourn.engine.server.telemetry.off import NoTelemetry
from sojourn.metrics.ledger import SERVER_ACCOUNTS, closes
from sojourn.metrics.run.directory import RunDirectory
from tests.engine.harness import stream_of, submit
from tests.engine.server_process import post, wait_for

CHAT = "/v1/chat/completions"
PROMPTS = ["The function returns", "Return a list", "x"]


@pytest.fixture(scope="module")
def ask(api_server):
    """(body) → the answer, which must be one."""

    def ask(path: str = "/v1/completions", **body) -> dict:
        if path == CHAT:
            body = {"prompt": None, "messages": [{"role": "user", "content": "Return a list"}]} | body
        answer = post(api_server, path, **({"max_tokens": 8} | body))
        assert answer.status_code == 200, answer.text
        return answer.json()

    return ask


@pytest.fixture(scope="module")
def chunks(api_server):
    """(body) → the chunks of a stream that ended well."""

    def chunks(path: str = "/v1/completions", **body) -> list[dict]:
        if path == CHAT:
            body = {"prompt": None, "messages": [{"role": "user", "content": "Return a list"}]} | body
        answer = post(api_server, path, **({"max_tokens": 8, "stream": True} | body))
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert events.pop() == "[DONE]"
        return [json.loads(event) for event in events]

    return chunks


def texts(answer: dict) -> list[str]:
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return [choice["text"] for choice in answer["choices"]]


def about(listed):
    """Equal but for what another batch, with other neighbours in a matrix product, rounds otherwise."""
    if isinstance(listed, list):
        return [about(entry) for entry in listed]
    if isinstance(listed, dict):
        return {key: about(value) for key, value in listed.items()}
    return pytest.approx(listed, abs=1e-3) if isinstance(listed, float) else listed


def joined(chunks: list[dict], field) -> dict[int, str]:
    """Index → the text of all its chunks."""
    told: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            told[choice["index"]] = told.get(choice["index"], "") + field(choice)
    return dict(sorted(told.items()))


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_list_of_prompts_is_answered_like_each_of_them_alone(ask, temperature):
    asked = {"temperature": temperature, "seed": 7, "ignore_eos": True}
    together = ask(prompt=PROMPTS, **asked)
    alone = [ask(prompt=prompt, **asked) for prompt in PROMPTS]
    assert texts(together) == [texts(answer)[0] for answer in alone]
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert together["usage"][count] == sum(answer["usage"][count] for answer in alone)


def test_a_list_of_id_lists_is_answered_like_the_texts(ask, api_server):
    ids = [httpx.post(f"{api_server.url}/tokenize", json={"prompt": text}).json()["tokens"] for text in PROMPTS]
    assert texts(ask(prompt=ids, temperature=0)) == texts(ask(prompt=PROMPTS, temperature=0))


def test_choices_are_reproducible_different_and_begin_with_the_one_that_comes_alone(ask):
    several, again = ask(n=5, seed=3), ask(n=5, seed=3)
    assert texts(several) == texts(again)
    assert len(set(texts(several))) == 5
    assert texts(several)[0] == texts(ask(seed=3))[0]
    assert texts(ask(n=2, seed=3)) == texts(several)[:2]
    assert several["usage"]["prompt_tokens"] == ask(seed=3)["usage"]["prompt_tokens"]


def test_choices_of_several_prompts_stand_prompt_by_prompt(ask):
    both = ask(prompt=PROMPTS[:2], n=3, seed=3)
    assert texts(both) == texts(ask(prompt=PROMPTS[0], n=3, seed=3)) + texts(ask(prompt=PROMPTS[1], n=3, seed=3))


def test_best_of_gives_those_of_highest_mean_log_probability(ask):
    drawn = ask(n=6, seed=3, logprobs=0)
    ranked = sorted(drawn["choices"], key=lambda choice: -fmean(choice["logprobs"]["token_logprobs"]))
    best = ask(n=2, best_of=6, seed=3)
    assert texts(best) == [choice["text"] for choice in ranked[:2]]
    assert best["usage"] == drawn["usage"]


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_a_stream_of_several_choices_says_what_the_whole_answer_says(ask, chunks, path):
    asked = {"n": 3, "seed": 5, "logprobs": 2 if path != CHAT else True, "stop": ["the"], "return_token_ids": True}
    whole, stream = ask(path, **asked), chunks(path, **asked, stream_options={"include_usage": True})
    field = (lambda c: c["delta"].get("content", "")) if path == CHAT else (lambda c: c["text"])
    said = [choice["message"]["content"] if path == CHAT else choice["text"] for choice in whole["choices"]]
    assert list(joined(stream, field).values()) == said
    for choice in whole["choices"]:
        own = [part for chunk in stream for part in chunk["choices"] if part["index"] == choice["index"]]
        own = own[1:] if path == CHAT else own  # the role comes first, alone
        assert [part["finish_reason"] for part in own if part["finish_reason"]] == [choice["finish_reason"]]
        assert [token for part in own for token in part["token_ids"]] == choice["token_ids"]
        assert own[-1].get("stop_reason") == choice.get("stop_reason")
        for name, listed in choice["logprobs"].items():
            if listed is not None:
                assert [entry for part in own for entry in part["logprobs"][name]] == about(listed)
    assert stream[-1]["usage"] | {"prompt_tokens_details": None} == whole["usage"] | {"prompt_tokens_details": None}
    assert all(chunk["usage"] is None for chunk in stream[:-1])


def test_echo_gives_the_prompt_and_its_log_probabilities_first(ask, chunks):
    prompt = "The function returns “é” 🙂"
    asked = {"prompt": prompt, "temperature": 0, "logprobs": 2}
    plain, echoed = ask(**asked)["choices"][0], ask(**asked, echo=True)["choices"][0]
    beside = ask(**asked, prompt_logprobs=2, return_token_ids=True)["choices"][0]
    assert echoed["text"] == prompt + plain["text"]
    count = len(beside["prompt_token_ids"])
    for name, listed in echoed["logprobs"].items():
        if name != "text_offset":
            assert listed[count:] == about(plain["logprobs"][name])
    assert echoed["logprobs"]["token_logprobs"][0] is None and beside["prompt_logprobs"][0] is None
    for position in range(1, count):
        told = beside["prompt_logprobs"][position][str(beside["prompt_token_ids"][position])]["logprob"]
        assert echoed["logprobs"]["token_logprobs"][position] == about(told)
    for offset, token in zip(echoed["logprobs"]["text_offset"], echoed["logprobs"]["tokens"], strict=True):
        assert token.startswith("bytes:") or echoed["text"][offset:].startswith(token)
    streamed = chunks(**asked, echo=True)
    assert joined(streamed, lambda choice: choice["text"])[0] == echoed["text"]
    assert streamed[0]["choices"][0]["logprobs"]["tokens"][:count] == echoed["logprobs"]["tokens"][:count]
    assert streamed[-1]["choices"][0]["logprobs"]["text_offset"][-1] == echoed["logprobs"]["text_offset"][-1]


def test_echo_with_no_output_gives_the_prompt_alone(ask):
    asked = {"prompt": PROMPTS, "echo": True, "logprobs": 1, "temperature": 0}
    scored, continued = ask(**asked, max_tokens=0), ask(**asked, max_tokens=1)
    assert texts(scored) == PROMPTS
    assert scored["usage"]["completion_tokens"] == 0 and continued["usage"]["completion_tokens"] == len(PROMPTS)
    for choice, longer in zip(scored["choices"], continued["choices"], strict=True):
        assert choice["logprobs"] == {name: about(listed[:-1]) for name, listed in longer["logprobs"].items()}
        # What lm-eval sums and compares: the greedy token is the best of the alternatives.
        assert max(longer["logprobs"]["top_logprobs"][-1].values()) == longer["logprobs"]["token_logprobs"][-1]


def test_chat_log_probabilities_spell_the_content_byte_by_byte(ask):
    asked = {"messages": [{"role": "user", "content": "Say “é” and 🙂"}], "logprobs": True, "max_tokens": 40}
    choice = ask(CHAT, **asked, top_logprobs=3, n=2, seed=1, temperature=2)["choices"][1]
    entries = choice["logprobs"]["content"]
    spelled = bytes(byte for entry in entries for byte in entry["bytes"])
    assert spelled.decode("utf-8", "replace").startswith(choice["message"]["content"])
    for entry in entries:
        assert len(entry["top_logprobs"]) == 3
        assert entry["logprob"] <= entry["top_logprobs"][0]["logprob"] <= 0


def test_what_ended_an_output_is_named_and_shown_only_where_asked(ask):
    asked = {"prompt": PROMPTS[0], "temperature": 0, "max_tokens": 30}
    full = ask(**asked, return_token_ids=True)["choices"][0]
    stop = full["text"][10:13]
    cut = ask(**asked, stop=stop)["choices"][0]
    shown = ask(**asked, stop=stop, include_stop_str_in_output=True)["choices"][0]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    assert shown["text"] == cut["text"] + stop
    token = full["token_ids"][5]
    ended = ask(**asked, stop_token_ids=[token], return_token_ids=True)["choices"][0]
    included = ask(**asked, stop_token_ids=[token], include_stop_str_in_output=True, ignore_eos=True)["choices"][0]
    assert ended["stop_reason"] == included["stop_reason"] == token
    assert ended["token_ids"] == full["token_ids"][: full["token_ids"].index(token) + 1]
    assert included["text"].startswith(ended["text"]) and len(included["text"]) > len(ended["text"])


def test_a_stop_string_waits_for_min_tokens(ask):
    asked = {"prompt": PROMPTS[0], "temperature": 0, "max_tokens": 30, "ignore_eos": True}
    stop = ask(**asked)["choices"][0]["text"][2:4]
    late = ask(**asked, stop=stop, min_tokens=20)
    assert ask(**asked, stop=stop)["usage"]["completion_tokens"] < 20 <= late["usage"]["completion_tokens"]
    assert stop in late["choices"][0]["text"]


def test_special_tokens_have_text_only_where_asked(ask):
    asked = {"prompt": "x", "allowed_token_ids": [2], "ignore_eos": True, "max_tokens": 2}
    assert texts(ask(**asked)) == [""]
    assert texts(ask(**asked, skip_special_tokens=False)) == ["<|im_end|>" * 2]


def test_a_bad_word_is_written_neither_at_a_beginning_nor_after_a_blank(ask):
    asked = {"prompt": "The", "temperature": 0, "max_tokens": 24, "ignore_eos": True}
    word = next(word for word in ask(**asked)["choices"][0]["text"].split() if word.isalpha())
    without = ask(**asked, bad_words=[word])["choices"][0]["text"]
    assert word not in without.split()


def test_logit_bias_and_allowed_tokens_decide_what_is_drawn(ask):
    forced = ask(prompt="x", logit_bias={"300": 100}, temperature=0, return_token_ids=True)
    assert forced["choices"][0]["token_ids"] == [300] * 8
    allowed = ask(prompt="x", allowed_token_ids=[300, 301], n=4, seed=1, return_token_ids=True)
    assert {token for choice in allowed["choices"] for token in choice["token_ids"]} == {300, 301}


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_timings_come_whole_and_with_the_final_usage_chunk_and_agree(ask, chunks, path):
    for told in (ask(path), chunks(path, stream_options={"include_usage": True})[-1]):
        assert set(told["ledger"]) == {info.name for info in SERVER_ACCOUNTS}
        assert set(told["metrics"]) == {
            "time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second",
        }  # fmt: skip
        assert sum(told["ledger"].values()) > told["metrics"]["generation_time_ms"] > 0
        assert min(told["ledger"].values()) >= 0
    assert "metrics" not in ask(path, n=2) and "ledger" in ask(path, n=2)
    assert not any("ledger" in chunk for chunk in chunks(path))


def test_a_call_with_many_sequences_is_one_record_whose_ledger_closes(api_server):
    for name, body in {
        "calls-whole": {"n": 4, "prompt": PROMPTS, "max_tokens": 6},
        "calls-stream": {"n": 3, "prompt": PROMPTS[:2], "max_tokens": 20, "stream": True, "stop": ["zq"]},
    }.items():
        answer = httpx.post(
            f"{api_server.url}/v1/completions", json={"model": "tiny-model", "ignore_eos": True} | body,
            headers={"x-request-id": name}, timeout=30,
        )  # fmt: skip
        assert answer.status_code == 200
    run = RunDirectory(api_server.log.parent / "run")

    def rows():
        table = run.table("requests")
        return table[table.request_id.str.startswith("calls-")]

    wait_for(lambda: len(rows()) == 2)
    whole, stream = rows().sort_values("request_id", ascending=False).itertuples()
    assert (whole.output_tokens, stream.output_tokens) == (4 * 3 * 6, 3 * 2 * 20)
    assert whole.prompt_tokens > stream.prompt_tokens and whole.finish_reason == stream.finish_reason == "length"
    for row in (whole, stream):
        assert len(row.token_ns) == row.output_tokens and list(row.token_ns) == sorted(row.token_ns)
        told = dict(row.prefix_outcomes)  # of all its prompts, each once
        assert sum(told.values()) == row.prompt_tokens and told.get("hit", 0) == row.cached_tokens
        latency = row.written_ns - row.arrived_ns
        for books, until in (("ledger", row.written_ns), ("ttft", row.first_written_ns)):
            left = until - row.arrived_ns - sum(getattr(row, f"{books}_{info.column}") for info in SERVER_ACCOUNTS)
            assert closes(left, latency), f"{left} ns of {latency} have no account"


def test_a_client_that_leaves_takes_all_sequences_of_its_call_with_it(api_server):
    asked = {
        "model": "tiny-model",
        "prompt": ["x", "y"],
        "n": 100,
        "max_tokens": 400,
        "stream": True,
        "ignore_eos": True,
    }
    headers = {"x-request-id": "left-alone"}
    with httpx.stream("POST", f"{api_server.url}/v1/completions", json=asked, headers=headers, timeout=30) as stream:
        next(stream.iter_lines())
    wait_for(lambda: api_server.gauge("sojourn_request_running") == api_server.gauge("sojourn_request_waiting") == 0)
    run = RunDirectory(api_server.log.parent / "run")

    def rows():
        table = run.table("requests")
        return table[table.request_id == "left-alone"]

    wait_for(lambda: len(rows()) == 1)
    row = next(rows().itertuples())
    assert row.finish_reason == "abort" and 0 < row.output_tokens < 200 * 400
    assert row.computed_tokens < 199 * 400  # none went on for nobody
    assert post(api_server, max_tokens=1).status_code == 200


def test_the_ledger_of_a_call_is_that_of_the_sequence_that_ended_last(api_server, ask):
    asked = {"prompt": PROMPTS[:2], "temperature": 0, "max_tokens": 60, "ignore_eos": True}
    first, second = texts(ask(**asked))
    stop = next(first[i : i + 4] for i in range(len(first)) if first[i : i + 4] not in second)
    headers = {"x-request-id": "critical-path"}
    body = {"model": "tiny-model", "stop": stop, "stream": True} | asked
    assert httpx.post(f"{api_server.url}/v1/completions", json=body, headers=headers, timeout=30).status_code == 200
    run = RunDirectory(api_server.log.parent / "run")

    def rows():
        table = run.table("requests")
        return table[table.request_id == "critical-path"]

    wait_for(lambda: len(rows()) == 1)
    row = next(rows().itertuples())
    assert row.output_tokens < 2 * 60
    until_last_token = row.token_ns[-1] - row.arrived_ns
    outside_of_stream = row.written_ns - row.arrived_ns - row.ledger_request_stream_ns
    assert outside_of_stream > 0.9 * until_last_token


@pytest.mark.parametrize("more", [{}, {"n": 3}, {"prompt": ["x", "y"]}], ids=str)
def test_controls_that_leave_no_token_are_the_clients_fault_whole_and_streamed(api_server, more):
    asked = {"min_tokens": 2, "allowed_token_ids": [2], "max_tokens": 4} | more  # 2 ends the output
    whole = post(api_server, **asked)
    assert whole.status_code == 400 and "leave no token" in whole.json()["error"]["message"]
    events = [line for line in post(api_server, **asked, stream=True).text.splitlines() if line]
    assert json.loads(events[-1].removeprefix("data: ")) == whole.json()
    wait_for(lambda: api_server.gauge("sojourn_request_running") == 0)


def core_client(**settings) -> CoreClient:
    config = EngineConfig(model="tiny-model", **settings)
    return CoreClient(config, NoTelemetry(config), Spare())


def test_a_call_is_admitted_with_all_its_sequences_or_not_at_all():
    async def check() -> None:
        core = core_client(max_num_seqs=4, max_waiting=2)
        try:
            core.state = "ready"
            core.admit(6)  # four places and two that may wait
            with pytest.raises(ApiError) as refused:
                core.admit(7)
            assert refused.value.status == 429 and "this call has 7" in refused.value.message
            core.streams = {str(i): stream_of(submit(str(i), [1])) for i in range(3)}
            core.admit(3)
            with pytest.raises(ApiError):
                core.admit(4)
        finally:
            await core.stop()

    asyncio.run(check())


@pytest.mark.server
def test_a_server_whose_core_cannot_be_started_says_so_instead_of_seeming_to_load(monkeypatch):
    async def check() -> None:
        core = core_client()
        monkeypatch.setattr("sys.executable", "/no/such/python")
        try:
            await core.start()
            await asyncio.wait_for(core.wait_for_change(), timeout=10)
            assert core.state == "failed" and "/no/such/python" in core.failure
        finally:
            await core.stop()

    asyncio.run(check())
