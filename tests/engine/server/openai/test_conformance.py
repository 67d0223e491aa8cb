"""The served API against the official one: openai-python's own types and its retries."""

from typing import Any

import httpx
import httpx2
import openai
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from sojourn.engine.server.errors import ApiError, core_lost

MODEL = "tiny-model"
MESSAGES = [
    {"role": "system", "content": "You write code."},
    {"role": "user", "content": [{"type": "text", "text": "Return "}, {"type": "text", "text": "a list"}]},
]


@pytest.fixture(scope="module")
def client(api_server):
    return openai.OpenAI(base_url=f"{api_server.url}/v1", api_key="unused", max_retries=0)


def valid(answer: Any) -> Any:
    """Re-validates what openai-python built without looking: strictly, with nothing converted."""
    told = answer.to_dict(exclude_unset=True)
    if isinstance(answer, Completion):
        for choice in told["choices"]:
            # In a stream the reason is null until the last chunk, as OpenAI sends it and the type does not say.
            choice["finish_reason"] = choice["finish_reason"] or "stop"
            if choice["logprobs"] is not None and choice["logprobs"]["token_logprobs"][:1] == [None]:
                # Nor does it say that the first token of an echo has none.
                choice["logprobs"]["token_logprobs"][0], choice["logprobs"]["top_logprobs"][0] = 0.0, {}
    type(answer).model_validate(told, strict=True)
    assert set(told) >= {"id", "object", "created"} | (set() if isinstance(answer, Model) else {"system_fingerprint"})
    return answer


CHAT = [
    {},
    {"n": 3, "seed": 1, "temperature": 1.5, "top_p": 0.9},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 20, "n": 2},
    {"max_completion_tokens": 3, "max_tokens": 3, "stop": ["a", "b"]},
    {"frequency_penalty": 2, "presence_penalty": -2, "logit_bias": {"300": 5}, "user": "x", "reasoning_effort": "none"},
    {"service_tier": "auto", "store": False, "metadata": {}, "modalities": ["text"], "prompt_cache_key": "k"},
    {"extra_body": {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True}},
    {"extra_body": {"cache_salt": "a", "priority": -1, "prompt_logprobs": 1, "return_token_ids": True}},
]
COMPLETIONS = [
    {},
    {"prompt": ["a", "b"], "n": 2},
    {"prompt": [[5, 6], [7]], "echo": True},
    {"prompt": [5, 6, 7], "echo": True, "logprobs": 5, "max_tokens": 0},
    {"best_of": 3, "n": 2, "logprobs": 0},
    {"logprobs": 3, "stop": "e", "seed": 4, "logit_bias": {"5": -100}, "suffix": None},
]


@pytest.mark.parametrize("asked", CHAT, ids=str)
def test_every_chat_and_every_chunk_of_it_is_what_openai_python_expects(client, asked):
    asked = {"model": MODEL, "messages": MESSAGES} | ({} if "max_tokens" in asked else {"max_tokens": 12}) | asked
    whole = valid(client.chat.completions.create(**asked))
    assert isinstance(whole, ChatCompletion) and len(whole.choices) == asked.get("n", 1)
    if "prompt_logprobs" in asked.get("extra_body", {}):
        return  # is not streamed
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = [valid(c) for c in client.chat.completions.create(**asked, stream=True, stream_options=options)]
    assert all(isinstance(chunk, ChatCompletionChunk) and chunk.usage is not None for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1
    if "seed" in asked:
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.parametrize("asked", COMPLETIONS, ids=str)
def test_every_completion_and_every_chunk_of_it_is_what_openai_python_expects(client, asked):
    asked = {"model": MODEL, "prompt": "The function", "max_tokens": 6} | asked
    valid(client.completions.create(**asked))
    if "best_of" not in asked:
        chunks = [valid(c) for c in client.completions.create(**asked, stream=True)]
        assert not any("usage" in chunk.to_dict() for chunk in chunks)


def test_openai_pythons_own_accumulator_builds_the_whole_answer_from_the_stream(client):
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 99, "stop": " ", "seed": 1, "n": 4, "logprobs": True}
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        told = valid(stream.get_final_completion())
    whole = client.chat.completions.create(**asked)
    for one, other in zip(told.choices, whole.choices, strict=True):
        assert (one.message.content, one.finish_reason) == (other.message.content, other.finish_reason)
        assert [t.token for t in one.logprobs.content] == [t.token for t in other.logprobs.content]


def test_models_are_listed_and_found_as_openai_python_expects(client):
    assert [valid(model).id for model in client.models.list()] == [MODEL]
    assert valid(client.models.retrieve(MODEL)).id == MODEL


def test_errors_carry_all_that_openai_python_shows(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt="x", n=1000, extra_headers={"x-request-id": "mine-1"})
    error = refused.value
    assert (error.param, error.code, error.type) == ("n", "invalid_value", "invalid_request_error")
    assert error.request_id == "mine-1"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody/has-this")


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (ApiError(500, "a fault"), False),
        (ApiError(429, "full", retry_after_seconds=3), True),
        (ApiError(503, "loading", retry_after_seconds=2), True),
        (core_lost("restarting"), True),
        (core_lost("draining"), True),
        (ApiError(400, "bad"), False),
        (ApiError(413, "large"), False),
    ],
    ids=lambda value: str(value),
)  # fmt: skip
def test_openai_python_tries_again_only_where_that_can_help_and_waits_as_it_is_told(error, again):
    client = openai.OpenAI(base_url="http://127.0.0.1:9", api_key="unused")
    answer = error.response()
    seen = httpx2.Response(answer.status_code, headers=dict(answer.headers))
    assert client._should_retry(seen) is again
    if again:
        assert client._parse_retry_after_header(seen.headers) == error.retry_after_seconds


def test_a_stream_can_be_read_without_a_library(api_server):
    asked = {"model": MODEL, "prompt": "x", "max_tokens": 3, "stream": True}
    answer = httpx.post(f"{api_server.url}/v1/completions", json=asked)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert events.pop() == "" and events[-1] == "data: [DONE]"
    assert all(event.startswith("data: {") and "\n" not in event for event in events[:-1])


def test_an_answer_of_openai_goes_back_as_it_came(client):
    """With all that the official answers hold beside the text, and null or empty for what was not in them."""
    empty = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}
    told = {"role": "assistant", "content": "A list of numbers."}

    def answer(message):
        messages = [*MESSAGES, message, *MESSAGES]
        return client.chat.completions.create(model=MODEL, messages=messages, max_tokens=6, seed=1).choices[0]

    assert answer(told | empty).message.content == answer(told).message.content
    with pytest.raises(openai.BadRequestError) as refused:
        answer(told | {"annotations": [{"type": "url_citation"}]})
    assert refused.value.param == "messages.2.annotations"
