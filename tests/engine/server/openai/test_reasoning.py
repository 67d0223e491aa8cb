"""Models that reason before they answer: chats and responses, whole and streamed, with tools and with grammars."""

import json

import httpx
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.engine.server.openai.test_tools import tool
from tests.engine.server.scripted_answers import events_of, model_with_template, post, scripted_app

EVENT = TypeAdapter(ResponseStreamEvent)
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
ASKED = {"messages": [{"role": "user", "content": "Why?"}], "max_tokens": 400}
# As Qwen3's: the model opens its reasoning, and `enable_thinking` false closes an empty one in the prompt.
TEMPLATE = """{%- if tools %}{{- '<tool_call>' }}{{- tools | tojson }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.reasoning_content %}{{- '<think>' + message.reasoning_content + '</think>' }}{%- endif %}
    {{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Graz"}}\n</tool_call>'
SAID = "<think>\nWhy </i> not?\n</think>\n\nBecause."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_with_template(tmp_path_factory.mktemp("reasoning") / "model", TEMPLATE)


def whole(app, **body) -> dict:
    answer = post(app, CHAT, ASKED | body)
    assert answer.status_code == 200, answer.text
    ChatCompletion.model_validate_json(answer.content, strict=True)
    return answer.json()


def joined(chunks: list[dict]) -> dict[str, str]:
    """The texts of a stream by their field."""
    told: dict[str, str] = {}
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
        for choice in chunk["choices"]:
            for name, value in choice["delta"].items():
                if isinstance(value, str) and name != "role":
                    told[name] = told.get(name, "") + value
    return told


@pytest.mark.parametrize("burst", [1, 3, 100])
def test_reasoning_is_apart_from_the_answer_whole_and_streamed(folder, burst):
    app, _ = scripted_app(folder, SAID, burst=burst)
    answer = whole(app)
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"] == message["reasoning"] == "Why </i> not?" and message["content"] == "Because."
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events_of(post(app, CHAT, ASKED | options))
    told = {"reasoning": "Why </i> not?", "reasoning_content": "Why </i> not?", "content": "Because."}
    assert joined(chunks) == told
    tokenizer = app.state.front.first.tokenizer
    spent = len(tokenizer.encode("<think>\nWhy </i> not?\n</think>"))
    details = [answer["usage"]["completion_tokens_details"], chunks[-1]["usage"]["completion_tokens_details"]]
    assert details[0] == details[1] and abs(details[0]["reasoning_tokens"] - spent) <= 1  # a token may span the end
    assert 0 < details[0]["reasoning_tokens"] < answer["usage"]["completion_tokens"]


def test_reasoning_can_be_left_out_and_is_still_counted(folder):
    app, _ = scripted_app(folder, SAID)
    answer = whole(app, include_reasoning=False)
    assert answer["choices"][0]["message"]["reasoning"] is None
    assert answer["choices"][0]["message"]["content"] == "Because."
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 5
    assert joined(events_of(post(app, CHAT, ASKED | {"include_reasoning": False, "stream": True}))) == {
        "content": "Because."
    }


def test_a_prompt_that_closes_the_reasoning_leaves_an_answer(folder):
    app, core = scripted_app(folder, "A </think> is said.")
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    for body in (off, {"reasoning_effort": "none"}):
        answer = whole(app, **body)
        message = answer["choices"][0]["message"]
        assert (message["content"], message["reasoning"]) == ("A </think> is said.", None)
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    for body in (off, {"reasoning": {"effort": "none"}}):
        assert post(app, RESPONSES, {"input": "Why?", "max_output_tokens": 99} | body).json()["output"][0]["content"]
    assert len({tuple(request.prompt_token_ids) for request in core.submitted}) == 1


def test_a_model_that_does_not_reason_can_be_told_not_to(api_server):
    for name, value, status in (
        ("enable_thinking", False, 200),
        ("thinking", False, 200),
        ("enable_thinking", True, 400),
    ):
        body = ASKED | {"model": "tiny-model", "max_tokens": 1, "chat_template_kwargs": {name: value}}
        assert httpx.post(f"{api_server.url}{CHAT}", json=body).status_code == status


def test_the_setting_goes_before_the_template(folder):
    for name, expected in (("none", (None, SAID)), ("deepseek_r1", ("Why </i> not?", "Because."))):
        message = whole(scripted_app(folder, SAID, reasoning_format=name)[0])["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == expected


def test_a_cut_inside_the_reasoning_leaves_no_content(folder):
    app, _ = scripted_app(folder, SAID)
    for more, reason in (({"max_tokens": 6}, "length"), ({"stop": "not"}, "stop")):  # a stop string counts there, too
        choice = whole(app, **more)["choices"][0]
        assert choice["message"]["content"] is None and choice["message"]["reasoning"].startswith("W")
        assert choice["finish_reason"] == reason and "not" not in choice["message"]["reasoning"]


@pytest.mark.parametrize("burst", [1, 4])
def test_calls_stand_behind_reasoning(folder, burst):
    app, _ = scripted_app(folder, f"<think>I ask {CALL}.</think>\n\n{CALL}", burst=burst)
    answer = whole(app, tools=[tool("weather")])["choices"][0]
    (call,) = answer["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Graz"} and answer["message"]["content"] is None
    assert answer["message"]["reasoning"] == f"I ask {CALL}." and answer["finish_reason"] == "tool_calls"
    chunks = events_of(post(app, CHAT, ASKED | {"tools": [tool("weather")], "stream": True}))
    assert joined(chunks) == {"reasoning": f"I ask {CALL}.", "reasoning_content": f"I ask {CALL}."}
    parts = [c["function"]["arguments"] for chunk in chunks for choice in chunk["choices"]
             for c in choice["delta"].get("tool_calls", [])]  # fmt: skip
    assert json.loads("".join(parts)) == {"city": "Graz"}


def test_earlier_reasoning_goes_back_to_the_template(folder):
    app, core = scripted_app(folder, "Yes.")
    turn = {"role": "assistant", "content": "Because."}
    for more in ({"reasoning": "Why not?"}, {"reasoning_content": "Why not?"}):
        whole(app, messages=[*ASKED["messages"], turn | more, *ASKED["messages"]])
    items = [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Why not?"}], "summary": []}, turn]
    user = {"role": "user", "content": "Why?"}
    assert post(app, RESPONSES, {"input": [user, *items, user], "max_output_tokens": 9}).status_code == 200
    prompts = [app.state.front.first.tokenizer.decode(request.prompt_token_ids) for request in core.submitted]
    assert len(set(prompts)) == 1 and "<think>Why not?</think>Because." in prompts[0]


def replayed(events: list[dict]) -> list[dict]:
    """The output that the events tell piece by piece."""
    output: list[dict] = []
    for number, event in enumerate(events):
        EVENT.validate_python(event)
        assert event["sequence_number"] == number
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            output.append(event["item"])
        elif kind == "content_part.added":
            output[-1]["content"].append(event["part"])
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            output[-1]["content"][0]["text"] += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert output[-1]["content"][0]["text"] == event["text"]
        elif kind == "output_item.done":
            assert output[-1] | {"status": event["item"]["status"]} == event["item"]
            output[-1] = event["item"]
    return output


@pytest.mark.parametrize("burst", [1, 100])
def test_a_response_has_a_reasoning_item(folder, burst):
    app, _ = scripted_app(folder, SAID, burst=burst)
    body = {"input": "Why?", "max_output_tokens": 200}
    answer = post(app, RESPONSES, body)
    Response.model_validate_json(answer.content, strict=True)
    reasoning, message = answer.json()["output"]
    assert reasoning["type"] == "reasoning" and reasoning["content"] == [
        {"type": "reasoning_text", "text": "Why </i> not?"}
    ]
    assert message["content"][0]["text"] == "Because." and reasoning["id"].startswith("rs_")
    assert answer.json()["usage"]["output_tokens_details"]["reasoning_tokens"] > 5
    events = events_of(post(app, RESPONSES, body | {"stream": True}))
    told = replayed(events)
    assert [item["content"][0]["text"] for item in told] == ["Why </i> not?", "Because."]
    assert events[-1]["response"]["output"] == told


def test_the_core_gets_a_grammar_that_begins_behind_the_reasoning(folder):
    """That such a grammar holds is a test of grammars. Both forms of it are checked by the worker, a real process."""
    for thinking in (True, False):
        app, core = scripted_app(folder, "abc")
        answer = whole(app, guided_regex="[a-c]{3}", chat_template_kwargs={"enable_thinking": thinking})
        assert answer["choices"][0]["message"]["content"] == "abc"
        head = core.submitted[0].sampling.grammar.head
        assert "<think>(?s:.*)" in head if thinking else head == ""
    refused = post(scripted_app(folder, "abc")[0], CHAT, ASKED | {"guided_grammar": "start: nothing"}).json()["error"]
    assert refused["param"] == "guided_grammar" and "line 1" in refused["message"]


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        (CHAT, {"reasoning_effort": "high"}, "reasoning_effort", "reads no such variable"),
        (CHAT, {"reasoning_effort": "huge"}, "reasoning_effort", "'none'"),
        (CHAT, {"thinking_token_budget": 5}, "thinking_token_budget", "as one token"),
        (CHAT, {"thinking_token_budget": -1}, "thinking_token_budget", "greater than or equal to 0"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "reasoning": "y"}]}, "messages", "only the assistant"),
        (CHAT, {"messages": [{"role": "assistant", "reasoning_content": "x", "reasoning": "y"}]}, "messages", "not bo"),
        (RESPONSES, {"reasoning": {"effort": "high"}}, "reasoning", "reads no such variable"),
        (RESPONSES, {"reasoning": {"summary": "auto"}}, "reasoning", "'auto'"),
        (RESPONSES, {"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input", "encrypted_content"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_with_its_field(folder, path, body, param, says):
    app, _ = scripted_app(folder, SAID)
    asked = ASKED if path == CHAT else {"input": "x"}
    answer = post(app, path, asked | body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and says in error["message"]


def test_reasoning_that_cannot_be_turned_off_is_refused(tmp_path):
    model = model_with_template(tmp_path / "model", "{{ messages[0].content }}<think>{# </think> #}")
    answer = post(scripted_app(model, "x</think>y")[0], CHAT, ASKED | {"reasoning_effort": "none"})
    assert answer.status_code == 400 and "cannot turn reasoning off" in answer.json()["error"]["message"]
    message = whole(scripted_app(model, "x</think>y")[0])["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("x", "y")
