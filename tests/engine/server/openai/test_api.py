"""The served API, from outside: openai's own client, and every field within and beyond its bounds."""

import httpx
import openai
import pytest

from tests.engine.server_process import post, wait_for

MODEL = "tiny-model"


@pytest.fixture(scope="module")
def server(api_server):
    return api_server


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


def test_openai_client_gets_the_same_text_streamed_and_whole(client):
    asked = dict(model=MODEL, messages=[{"role": "user", "content": "Return a list"}], max_tokens=24, temperature=0)
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content and text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_openai_client_completes_text_and_counts_continuous_usage(client):
    asked = dict(
        model=MODEL, prompt="The function returns", max_tokens=16, temperature=0, extra_body={"ignore_eos": True}
    )
    whole = client.completions.create(**asked)
    assert whole.usage.completion_tokens == 16 and whole.choices[0].finish_reason == "length"
    asked["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.completions.create(**asked, stream=True))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 16
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text


def test_seed_gives_the_same_text_and_another_seed_another(client):
    def say(seed: int) -> str:
        asked = dict(model=MODEL, prompt="Return the", max_tokens=24, temperature=1.0, seed=seed)
        return client.completions.create(**asked).choices[0].text

    assert say(5) == say(5)
    assert len({say(seed) for seed in range(4)}) > 1


def test_text_ends_before_the_first_stop_string_streamed_and_whole(client):
    asked = dict(model=MODEL, prompt="The function returns", max_tokens=30, temperature=0)
    full = client.completions.create(**asked).choices[0].text
    stop = full[8:12]
    cut = client.completions.create(**asked, stop=[stop, "never there"]).choices[0]
    assert cut.text == full[: full.index(stop)] and cut.finish_reason == "stop"
    chunks = list(client.completions.create(**asked, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == cut.text
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_temperature_next_to_zero_is_greedy(server):
    greedy = post(server, max_tokens=12, temperature=0).json()["choices"][0]["text"]
    assert post(server, max_tokens=12, temperature=1e-50).json()["choices"][0]["text"] == greedy


def test_chat_with_two_limits_is_refused(server):
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "max_completion_tokens": 6}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json={"model": MODEL} | body)
    assert answer.status_code == 400 and "not both" in answer.json()["error"]["message"]


def test_models_are_listed_and_unknown_ones_are_not_found(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    with pytest.raises(openai.NotFoundError) as refused:
        client.completions.create(model="other", prompt="x")
    assert refused.value.code == "model_not_found" and "tiny-model" in str(refused.value)


def test_prompt_as_ids_equals_prompt_as_text(server, client):
    text = "Return a new list"
    ids = httpx.post(f"{server.url}/tokenize", json={"prompt": text}).json()["tokens"]
    asked = dict(model=MODEL, max_tokens=8, temperature=0)
    assert client.completions.create(prompt=ids, **asked).choices[0].text == (
        client.completions.create(prompt=text, **asked).choices[0].text
    )


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"prompt": None}, "prompt", "required"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": ["a", [5]]}, "prompt", "list of 2"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": ["a", ""]}, "prompt", "empty"),
        ({"prompt": ["a"] * 129}, "prompt", "may have 128"),
        ({"prompt": ["a"] * 128, "n": 3}, "n", "may have 256"),
        ({"prompt": [1.5] * 1000}, "prompt", "list of 1000"),
        ({"prompt": "x " * 500_000}, "prompt", "at least"),
        ({"top_k": 2**31}, "top_k", "less than"),
        ({"top_k": 2**70}, "top_k", "less than"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs `stream`"),
        ({"prompt": [5, 99999]}, "prompt", "99999"),
        ({"temperature": 2.5}, "temperature", "2.5"),
        ({"temperature": -0.1}, "temperature", "-0.1"),
        ({"top_p": -0.1}, "top_p", "greater than or equal to 0"),
        ({"top_k": -2}, "top_k", "-2"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": "many"}, "max_tokens", "many"),
        ({"seed": 2**63}, "seed", "less than"),
        ({"stop": [""]}, "stop", "at least 1 character"),
        ({"stop": ["x", None]}, "stop", "`stop.1`=None"),
        ({"stop": ["x"] * 17}, "stop", "16"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 129}, "n", "less than or equal to 128"),
        ({"best_of": 129}, "best_of", "less than or equal to 128"),
        ({"best_of": 1, "n": 2}, "best_of", "at least `n`, 2"),
        ({"best_of": 2, "stream": True}, "best_of", "cannot be streamed"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"logprobs": True}, "logprobs", "integer"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "cannot be streamed"),
        ({"presence_penalty": 2.5}, "presence_penalty", "less than or equal to 2"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "less than or equal to 100"),
        ({"logit_bias": {"five": 1}}, "logit_bias", "'five'"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "99999"),
        ({"logit_bias": {str(i): 0 for i in range(1025)}}, "logit_bias", "1024"),
        ({"bad_words": ["x"] * 129}, "bad_words", "128"),
        ({"allowed_token_ids": [5, 99999]}, "allowed_token_ids", "99999"),
        ({"stop_token_ids": [99999]}, "stop_token_ids", "99999"),
        ({"min_tokens": 17}, "min_tokens", "16 tokens"),
        ({"priority": 2**31}, "priority", "less than"),
        ({"suffix": "end"}, "suffix", "leave it out"),
        ({"tempratur": 1}, "tempratur", "not a field"),
        ({"stream": True, "stream_options": {"include": 1}}, "stream_options.include", "not a field"),
        ({"max_tokens": 511}, "max_tokens", "at most"),
        ({"prompt": [7] * 512}, "prompt", "max_model_len is 512"),
        ({"prompt": [[7], [99999] * 513]}, "prompt", "513 tokens"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options", "input should be"),
        ({"allowed_token_ids": [5] * 262_145}, "allowed_token_ids", "262144"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_field_is_refused_with_its_name_value_bound_and_way_out(server, body, param, says):
    answer = post(server, **body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param and says in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"temperature": 2}, {"temperature": 0}, {"top_p": 1}, {"top_p": 0}, {"top_k": -1}, {"top_k": 2**31 - 1},
        {"seed": 2**63 - 1}, {"stop": ["x"] * 16},
        {"n": 128}, {"best_of": 128, "n": 127}, {"prompt": ["a"] * 128, "n": 2}, {"logprobs": 20},
        {"logit_bias": {"5": -100}},
        {"priority": -(2**31)}, {"min_tokens": 1}, {"max_tokens": 0, "echo": True}, {"bad_words": ["x"] * 128},
        {"n": 1, "logprobs": None, "presence_penalty": 0, "logit_bias": {}, "best_of": 1, "echo": False},
        {"prompt": [7] * 511, "max_tokens": 1}, {"prompt": [7], "max_tokens": 511}, {"stream_options": None},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
    ],
    ids=str,
)  # fmt: skip
def test_values_at_the_bound_and_fields_that_ask_for_nothing_pass(server, body):
    answer = post(server, **({"max_tokens": 1} | body))
    assert answer.status_code == 200, answer.text


def test_chat_is_refused_by_field_too(server):
    def refused(**body) -> dict:
        answer = httpx.post(f"{server.url}/v1/chat/completions", json={"model": MODEL} | body)
        assert answer.status_code == 400
        return answer.json()["error"]

    assert refused(messages=[])["param"] == "messages"
    assert refused(messages=[{"role": "robot", "content": "x"}])["param"] == "messages"
    assert (
        refused(messages=[{"role": "user", "content": "x"}], tools=[{"type": "function"}])["param"]
        == "tools.0.function"
    )
    assert refused(messages=[{"role": "user", "content": "x " * 2000}])["code"] == "context_length_exceeded"


def test_broken_bodies_and_unknown_paths_get_the_official_error_shape(server):
    def sent(content: bytes, path: str = "/v1/completions") -> httpx.Response:
        return httpx.post(f"{server.url}{path}", content=content, headers={"content-type": "application/json"})

    for answer, status in [
        (sent(b"{not json"), 400),
        (sent(b"[1, 2]"), 400),
        (sent(b"\xff\xfe"), 400),
        (sent(b"[" * 100_000), 400),
        (sent(b'{"model": "tiny-model", "prompt": "a\\ud800b"}'), 400),
        (sent(b'{"model": "tiny-model", "seed": ' + b"9" * 5000 + b"}"), 400),
        (sent(b'{"prompt": "a\\ud800b"}', "/tokenize"), 400),
        (httpx.get(f"{server.url}/v1/nothing"), 404),
        (httpx.get(f"{server.url}/v1/completions"), 405),
    ]:
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert answer.headers["allow"] == "POST" and "use POST" in answer.json()["error"]["message"]


@pytest.mark.parametrize("chunked", [False, True])
def test_body_over_the_limit_gets_413_with_or_without_a_declared_length(tmp_path_factory, server, chunked):
    body = b'{"model": "tiny-model", "prompt": "' + b"x" * 8_388_608 + b'"}'
    content, json_type = iter([body]) if chunked else body, {"content-type": "application/json"}
    answer = httpx.post(f"{server.url}/v1/completions", content=content, headers=json_type, timeout=30)
    assert answer.status_code == 413 and "max_body_bytes" in answer.json()["error"]["message"]


def test_request_id_is_echoed_or_made(server):
    assert httpx.get(f"{server.url}/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert len(httpx.get(f"{server.url}/health", headers={"x-request-id": "a b"}).headers["x-request-id"]) == 32


def test_openai_client_cancels_a_stream_cleanly(server, client):
    aborted = 'sojourn_request_finished_total{model_name="tiny-model",outcome="abort"}'

    def count() -> float:
        page = httpx.get(f"{server.url}/metrics").text
        return float(next(line for line in page.splitlines() if line.startswith(aborted)).rsplit(" ", 1)[1])

    before = count()
    stream = client.completions.create(
        model=MODEL, prompt="The", n=128, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    wait_for(lambda: count() == before + 1)
    assert post(server, max_tokens=1).status_code == 200
