"""A field that a request does not send is the checkpoint's, at every endpoint; one that it sends is the request's."""

import asyncio
import json
import shutil

import pytest

from sojourn.engine.config import model_folder
from sojourn.engine.server.openai.protocol import CompletionRequest, GenerationRequest
from sojourn.engine.token.generation_config import TAKEN
from tests.engine.server.scripted_core import READY, serving

MODEL = "own"
WANTED = {"temperature": 0.6, "top_p": 0.9, "top_k": 7, "min_p": 0.05, "repetition_penalty": 1.2}
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
ENDPOINTS = {
    "/v1/completions": {"prompt": "The queue"},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "hi"},
    "/v1/messages": CHAT | {"max_tokens": 4},
}
LIMITS = {"/v1/completions": "max_tokens", "/v1/chat/completions": "max_completion_tokens",
          "/v1/responses": "max_output_tokens"}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("defaults"), WANTED | {"max_new_tokens": 9, "do_sample": False})


def checkpoint(path, said):
    folder = shutil.copytree(model_folder("tiny-model"), path / MODEL)
    (folder / "generation_config.json").write_text(json.dumps(said))
    return folder


def asked(folder, route, bodies, **settings):
    """What the core got for each body, and the last answer."""

    async def ask():
        async with serving(str(folder), **settings) as (_, core, client):
            for body in bodies:
                answer = await client.post(route, json={"model": MODEL} | ENDPOINTS.get(route, {}) | body)
                assert answer.status_code == 200, answer.text
            return [submit.sampling for submit in core.submitted], answer

    return asyncio.run(ask())


def picked(sampling):
    return {name: getattr(sampling, name) for name in WANTED}


@pytest.mark.parametrize("route", ENDPOINTS)
def test_what_is_not_sent_is_the_checkpoints_and_what_is_sent_is_not(folder, route):
    known = ["temperature", "top_p", "top_k"] if route == "/v1/messages" else list(WANTED)
    bodies = [
        {},
        {"stream": True},
        dict.fromkeys(known),
        {name: NEUTRAL[name] for name in known},
        *({name: NEUTRAL[name]} for name in known),
    ]
    absent, streamed, null, neutral, *single = asked(folder, route, bodies)[0]
    assert picked(absent) == picked(streamed) == picked(null) == WANTED
    assert picked(neutral) == WANTED | {name: NEUTRAL[name] for name in known}
    assert [picked(one) for one in single] == [WANTED | {name: NEUTRAL[name]} for name in known]


@pytest.mark.parametrize("route", ENDPOINTS)
def test_option_switches_the_checkpoints_sampling_off(folder, route):
    (sampling,), _ = asked(folder, route, [{}], generation_config="none")
    assert picked(sampling) == NEUTRAL
    assert sampling.max_tokens not in (9, 0)


@pytest.mark.parametrize("route", LIMITS)
def test_max_new_tokens_is_the_limit_of_requests_without_one_and_never_beyond_the_context(tmp_path, folder, route):
    own = LIMITS[route]
    absent, null, more, less = asked(folder, route, [{}, {own: None}, {own: 30}, {own: 3}])[0]
    assert [each.max_tokens for each in (absent, null, more, less)] == [9, 9, 30, 3]
    (unbounded,), _ = asked(checkpoint(tmp_path, {"max_new_tokens": 10**6}), route, [{}])
    # 16 is the default of completions themselves, which vLLM keeps, too
    expected = 16 if route == "/v1/completions" else READY.max_model_len
    assert expected - 40 < unbounded.max_tokens <= expected


def test_echo_of_a_prompt_alone_stays_what_it_is(folder):
    answer = asked(folder, "/v1/completions", [{"max_tokens": 0, "echo": True}])[1]
    assert answer.json()["choices"][0]["text"] == "The queue"


def test_answers_cards_and_renderers_show_what_is_used(folder):
    response = asked(folder, "/v1/responses", [{}])[1].json()
    assert (response["temperature"], response["top_p"]) == (0.6, 0.9)
    assert response["max_output_tokens"] is None

    async def ask():
        async with serving(str(folder)) as (_, _, client):
            card = (await client.get("/v1/models")).json()["data"][0]
            rendered = await client.post("/v1/chat/completions/render", json={"model": MODEL} | CHAT)
            completed = await client.post("/v1/completions/render", json={"model": MODEL, "prompt": "a"})
            return card["engine"], rendered.json(), completed.json()[0]

    shown, rendered, completed = asyncio.run(ask())
    assert shown["sampling_defaults"] == WANTED | {"max_tokens": 9}
    for each in (rendered, completed):
        used = each["sampling_params"]
        assert used["max_tokens"] == 9 and used["top_k"] == 7 and used["temperature"] == 0.6 and used["min_p"] == 0.05


def test_checkpoint_may_say_what_a_request_may_say():
    for key, (kind, least, most) in TAKEN.items():
        name = "max_tokens" if key == "max_new_tokens" else key
        of = CompletionRequest if key == "max_new_tokens" else GenerationRequest
        field = of.model_fields[name]
        assert field.annotation is kind
        bounds = {type(bound).__name__: next(iter(vars_of(bound))) for bound in field.metadata}
        if key != "max_new_tokens":
            assert bounds["Ge"] == least
            assert bounds.get("Le", bounds.get("Lt", 0) - 1) == most


def vars_of(bound):
    return [getattr(bound, name) for name in bound.__dataclass_fields__]
