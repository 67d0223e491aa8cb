"""An output that fails ends alone: with its sentence, and beside it all others are whole."""

import json

import pytest

from sojourn.engine.token.text.stream import TextStream
from tests.engine.server.core.own_application import MODEL

pytestmark = pytest.mark.server

A, B = 68, 69  # tokens of the bundled model
# "a" is an output, and "b" is none: the token that must follow it is not allowed.
DEAD_END = {"structured_outputs": {"choice": ["a", "bc"]}, "allowed_token_ids": [A, B], "temperature": 2, "seed": 0}
ASKED = {"model": MODEL, "max_tokens": 4}


def both(choices, key):
    """(texts of good ones, sentences of failed ones)"""
    failed = [choice for choice in choices if choice["finish_reason"] == "error"]
    return [key(choice) for choice in choices if choice not in failed], [choice["error"] for choice in failed]


def test_a_choice_without_a_token_left_ends_alone(application):
    async def check(app, client) -> None:
        await _check(client, "/v1/completions", {"prompt": "The"}, lambda choice: choice["text"])
        chat = {"messages": [{"role": "user", "content": "The"}]}
        await _check(client, "/v1/chat/completions", chat, lambda choice: choice["message"]["content"])
        answer = await client.post("/v1/completions", json=ASKED | DEAD_END | {"prompt": "The", "best_of": 8})
        (choice,) = answer.json()["choices"]
        assert choice["text"] == "a" and choice["finish_reason"] == "stop", "a failed output was chosen as the best"
        assert not app.state.front.first.core.streams

    application.run(check)


async def _check(client, path, prompt, read) -> None:
    body = ASKED | DEAD_END | prompt | {"n": 8}
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    good, errors = both(answer.json()["choices"], read)
    assert good and errors and set(good) == {"a"}
    assert all("no token to draw" in error["message"] and error["code"] == "generation_failed" for error in errors)
    streamed = await client.post(path, json=body | {"stream": True})
    lines = [line.removeprefix("data: ") for line in streamed.text.strip().split("\n\n")]
    assert lines[-1] == "[DONE]"
    ends = [choice for line in lines[:-1] for choice in json.loads(line)["choices"] if choice["finish_reason"]]
    assert sum(end["finish_reason"] == "error" for end in ends) == len(errors)
    assert len(ends) == 8 and all("error" in end for end in ends if end["finish_reason"] == "error")
    for n in (1, 8):  # none is left
        none = await client.post(path, json=body | {"n": n, "allowed_token_ids": [B]})
        assert none.status_code == 400 and "no token to draw" in none.json()["error"]["message"]


def test_a_fault_in_the_text_of_one_prompt_ends_no_other(application, monkeypatch):
    push, prompts = TextStream.push, ["The", "A list"]

    async def check(app, client) -> None:
        body = ASKED | {"prompt": prompts, "temperature": 0, "ignore_eos": True}
        whole = [choice["text"] for choice in (await client.post("/v1/completions", json=body)).json()["choices"]]
        seen: list[TextStream] = []

        def fail(stream: TextStream, token_id: int) -> str:
            if stream not in seen:
                seen.append(stream)
            if stream is seen[0]:
                raise ZeroDivisionError
            return push(stream, token_id)

        with monkeypatch.context() as patch:
            patch.setattr(TextStream, "push", fail)
            answer = await client.post("/v1/completions", json=body)
        texts, errors = both(answer.json()["choices"], lambda choice: choice["text"])
        assert len(texts) == len(errors) == 1 and texts[0] in whole and "its log says why" in errors[0]["message"]
        after = await client.post("/v1/completions", json=body)
        assert [choice["text"] for choice in after.json()["choices"]] == whole
        assert not app.state.front.first.core.streams

    application.run(check)
