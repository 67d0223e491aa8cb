"""POST /v1/messages from outside: Anthropic's own client, every event in the official shape, and what is refused."""

import json
import os
import signal

import anthropic
import httpx
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from sojourn.engine.server.errors import ApiError
from tests.engine.server.openai.test_reasoning import CALL, TEMPLATE
from tests.engine.server.openai.test_tools import WEATHER
from tests.engine.server.scripted_answers import events_of, model_with_template, post, scripted_app
from tests.engine.server_process import ended_request

MODEL = "tiny-model"
MESSAGES = "/v1/messages"
GREEDY = {"temperature": 0}  # which the newest version of the official client no longer names
COUNT = f"{MESSAGES}/count_tokens"
EVENT = TypeAdapter(RawMessageStreamEvent)
USER = {"role": "user", "content": "Why?"}
ASKED = {"messages": [USER], "max_tokens": 200}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [{"name": "weather", "description": "tells the weather", "input_schema": WEATHER},
         {"name": "time", "input_schema": NOTHING}]  # fmt: skip


@pytest.fixture(scope="module")
def client(api_server):
    return anthropic.Anthropic(base_url=api_server.url, api_key="unused", max_retries=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_with_template(tmp_path_factory.mktemp("messages") / "model", TEMPLATE)


def streamed(client, **asked) -> Message:
    """The final message, as the official helper builds it from the events."""
    with client.messages.stream(model=MODEL, **asked) as stream:
        for event in stream:
            assert event.type != "error"
        return stream.get_final_message()


def comparable(message: Message) -> dict:
    return message.to_dict(exclude_unset=True) | {"id": "", "ledger": None, "metrics": None, "usage": None}


def test_the_official_client_gets_the_same_text_whole_and_streamed(client, api_server):
    asked = dict(messages=[{"role": "user", "content": "Return a list"}], max_tokens=16)
    whole = client.messages.create(model=MODEL, extra_body=GREEDY, **asked)
    Message.model_validate(whole.to_dict(exclude_unset=True), strict=True)
    assert whole.id == f"msg_{whole._request_id}" and whole.role == "assistant" and whole.model == MODEL
    same = httpx.post(f"{api_server.url}/v1/chat/completions", json={"model": MODEL} | asked | GREEDY).json()
    assert whole.content[0].text == same["choices"][0]["message"]["content"]
    usage = whole.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == same["usage"]["prompt_tokens"]
    assert usage.output_tokens == same["usage"]["completion_tokens"] and usage.cache_creation_input_tokens == 0
    assert whole.stop_reason == {"stop": "end_turn", "length": "max_tokens"}[same["choices"][0]["finish_reason"]]
    final = streamed(client, extra_body=GREEDY, **asked)
    assert comparable(final)["content"] == comparable(whole)["content"] and final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == usage.output_tokens


def test_usage_says_what_the_cache_gave(client):
    asked = dict(model=MODEL, max_tokens=1, messages=[{"role": "user", "content": "A long prompt for messages, " * 8}])
    first, second = client.messages.create(**asked).usage, client.messages.create(**asked).usage
    assert second.cache_read_input_tokens > 0 == first.cache_read_input_tokens % 16
    sums = {usage.input_tokens + usage.cache_read_input_tokens for usage in (first, second)}
    counted = client.messages.count_tokens(model=MODEL, messages=asked["messages"]).input_tokens
    assert sums == {counted}


def test_a_stop_sequence_is_named_and_cut_off(client):
    asked = dict(messages=[{"role": "user", "content": "Return a list"}], max_tokens=30, extra_body=GREEDY)
    text = client.messages.create(model=MODEL, **asked).content[0].text
    stop = text[8:12]
    for answer in (client.messages.create(model=MODEL, stop_sequences=[stop, "never"], **asked),
                   streamed(client, stop_sequences=[stop], **asked)):  # fmt: skip
        assert answer.content[0].text == text[: text.index(stop)]
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}], ids=str)
def test_a_forced_call_is_a_valid_tool_use_whole_and_streamed(client, choice):
    choice = choice | {"disable_parallel_tool_use": True}
    asked = dict(messages=[USER], max_tokens=150, extra_body=GREEDY, tools=TOOLS, tool_choice=choice)
    whole, final = client.messages.create(model=MODEL, **asked), streamed(client, **asked)
    (use,) = whole.content
    assert use.type == "tool_use" and use.id.startswith("toolu_") and whole.stop_reason == "tool_use"
    assert use.input == {} if use.name == "time" else set(use.input) == {"city", "metric"}
    assert [(b.name, b.input) for b in final.content] == [(use.name, use.input)]
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "sunny"}]}
    turns = [USER, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    again = client.messages.create(model=MODEL, messages=turns, tools=TOOLS, max_tokens=2, tool_choice={"type": "none"})
    assert again.stop_reason in ("end_turn", "max_tokens")


def test_the_output_follows_a_schema(client):
    shape = {"type": "json_schema", "schema": WEATHER}
    answer = client.messages.create(model=MODEL, messages=[USER], max_tokens=200, output_config={"format": shape})
    assert set(json.loads(answer.content[0].text)) == {"city", "metric"}


def test_user_id_is_the_tenant_and_the_call_is_recorded(client, api_server):
    client.messages.create(
        model=MODEL,
        messages=[USER],
        max_tokens=2,
        metadata={"user_id": "u-7"},
        extra_headers={"x-request-id": "msgs-1"},
    )
    record = ended_request(api_server, "msgs-1")
    assert record["tenant"] == "u-7" and record["output_tokens"] <= 2


def test_errors_are_those_that_the_official_client_knows(client):
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(model="other", messages=[USER], max_tokens=1)
    assert unknown.value.type == "not_found_error" and "tiny-model" in unknown.value.api_message
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(model=MODEL, messages=[USER], max_tokens=0, extra_headers={"x-request-id": "mine-2"})
    assert refused.value.type == "invalid_request_error" and "max_tokens" in refused.value.api_message
    assert refused.value.request_id == "mine-2"


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (401, "authentication_error"), (403, "permission_error"), (404, "not_found_error"),
     (405, "invalid_request_error"), (413, "request_too_large"), (429, "rate_limit_error"), (500, "api_error"),
     (503, "overloaded_error")],
)  # fmt: skip
def test_every_status_has_its_type(status, kind):
    error = ApiError(status, "no")
    shown = json.loads(error.response("/v1/messages/count_tokens").body)
    assert shown == {"type": "error", "error": {"type": kind, "message": "no"}} == error.anthropic_body()
    assert set(json.loads(error.response("/v1/chat/completions").body)["error"]) == {"message", "type", "param", "code"}


def test_unknown_paths_and_methods_below_it_have_the_shape(api_server):
    for answer, status in ((httpx.get(f"{api_server.url}{MESSAGES}"), 405),
                           (httpx.post(f"{api_server.url}{MESSAGES}/batches", json={}), 404),
                           (httpx.post(f"{api_server.url}{MESSAGES}", content=b"{"), 415),
                               (httpx.post(f"{api_server.url}{MESSAGES}", json=[]), 400)):  # fmt: skip
        assert answer.status_code == status and answer.json()["type"] == "error"


def test_a_stream_whose_core_dies_ends_with_an_error_event(tool_server):
    body = {"model": MODEL, "stream": True, "max_tokens": 900, "messages": [USER], "temperature": 1}
    events = []
    with httpx.stream("POST", f"{tool_server.url}{MESSAGES}", json=body, timeout=30) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line.removeprefix("data: ")))
                if len(events) == 4:
                    os.kill(tool_server.core_pid(), signal.SIGKILL)
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "overloaded_error" and "core died" in events[-1]["error"]["message"]
    tool_server.wait_ready()


# A scripted core: what the tiny model would not say.


def blocks_of(events: list[dict]) -> list[dict]:
    """The content that the events tell piece by piece; checks that each stands where it may."""
    content: list[dict] = []
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start" and kinds.count("message_start") == 1
    assert kinds[-2:] == ["message_delta", "message_stop"]
    is_open = False
    for event in events:
        EVENT.validate_python(event)
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(content)
            content.append(event["content_block"] | ({"input": ""} if "input" in event["content_block"] else {}))
            is_open = True
        elif event["type"] == "content_block_delta":
            assert is_open and event["index"] == len(content) - 1
            (name,) = event["delta"].keys() - {"type"}
            field = {"partial_json": "input"}.get(name, name)
            content[-1][field] += event["delta"][name]
        elif event["type"] == "content_block_stop":
            assert is_open and event["index"] == len(content) - 1
            is_open = False
    assert not is_open
    return content


@pytest.mark.parametrize("burst", [1, 5, 200])
def test_thinking_text_and_calls_are_blocks_in_their_order(folder, burst):
    tools = [TOOLS[0]]
    app, _ = scripted_app(folder, f"<think>\nHm.\n</think>\n\nI look. {CALL}", burst=burst)
    answer = post(app, MESSAGES, ASKED | {"tools": tools})
    Message.model_validate_json(answer.content, strict=True)
    thinking, text, use = answer.json()["content"]
    assert thinking == {"type": "thinking", "thinking": "Hm.", "signature": ""}
    assert text["text"] == "I look. " and use["name"] == "weather" and use["input"] == {"city": "Graz"}
    assert answer.json()["stop_reason"] == "tool_use"
    assert answer.json()["usage"]["output_tokens_details"]["thinking_tokens"] > 2
    events = events_of(post(app, MESSAGES, ASKED | {"tools": tools, "stream": True}))
    told = blocks_of(events)
    assert told[:2] == [thinking, text] and json.loads(told[2]["input"]) == {"city": "Graz"}
    assert events[0]["message"]["usage"]["input_tokens"] == answer.json()["usage"]["input_tokens"]
    assert events[-2]["usage"] == answer.json()["usage"] and events[-2]["delta"]["stop_reason"] == "tool_use"


def test_omitted_thinking_leaves_an_empty_block(folder):
    app, _ = scripted_app(folder, "<think>Hm.</think>Yes.")
    thinking = {"type": "adaptive", "display": "omitted"}
    for body in (ASKED, ASKED | {"stream": True}):
        answer = post(app, MESSAGES, body | {"thinking": thinking})
        content = blocks_of(events_of(answer)) if "stream" in body else answer.json()["content"]
        assert [block.get("thinking", block.get("text")) for block in content] == ["", "Yes."]


def test_thinking_sets_what_the_template_reads(folder):
    app, core = scripted_app(folder, "Yes.")
    for thinking in (None, {"type": "adaptive"}, {"type": "disabled"}):
        post(app, MESSAGES, ASKED | {"thinking": thinking})
    ends = [app.state.front.first.tokenizer.decode(r.prompt_token_ids)[-10:] for r in core.submitted]
    assert ends[0] == ends[1] and "</think>" in ends[2] and "</think>" not in ends[0]


def test_a_cut_call_has_the_part_that_came(folder):
    for said, expected in ((CALL[:-17], {"city": "Gra"}), (CALL.replace('"Graz"}', "Graz"), None)):
        app, _ = scripted_app(folder, said)
        use = post(app, MESSAGES, ASKED | {"tools": TOOLS[:1]}).json()["content"][0]
        assert use["input"] == expected or (expected is None and "Graz" in use["input"]["unparsed"])


def test_blocks_become_the_messages_of_a_chat(folder):
    app, core = scripted_app(folder, "Yes.")
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "My name "}, {"type": "text", "text": "is A"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "x"},
            {"type": "text", "text": "Hello", "citations": None},
            {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Graz"}, "caller": None},
        ]},
        {"role": "user", "content": [
            {"type": "text", "text": "And?", "cache_control": {"type": "ephemeral"}},
            {"type": "tool_result", "tool_use_id": "1", "content": "no sun", "is_error": True},
        ]},
    ]  # fmt: skip
    system = [{"type": "text", "text": "Be brief", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    assert post(app, MESSAGES, ASKED | {"messages": turns, "system": system, "tools": TOOLS}).status_code == 200
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Graz"}'}}
    chat = [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "My name is A"},
        {"role": "assistant", "content": "Hello", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "Error: no sun"},
        {"role": "user", "content": "And?"},
    ]
    tools = [
        {"type": "function", "function": {{"input_schema": "parameters"}.get(k, k): v for k, v in tool.items()}}
        for tool in TOOLS
    ]
    post(app, "/v1/chat/completions", {"messages": chat, "tools": tools, "max_tokens": 9})
    prompts = [request.prompt_token_ids for request in core.submitted]
    assert prompts[0] == prompts[1]
    counted = post(app, COUNT, {"messages": turns, "system": system, "tools": TOOLS}).json()
    assert counted == {"input_tokens": len(prompts[0])}


def test_a_last_message_of_the_assistant_is_continued(folder):
    app, core = scripted_app(folder, " of lists.")
    turns = [USER, {"role": "assistant", "content": "A list"}]
    assert post(app, MESSAGES, ASKED | {"messages": turns}).json()["content"][0]["text"] == " of lists."
    assert app.state.front.first.tokenizer.decode(core.submitted[0].prompt_token_ids).endswith("A list")


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "`messages.0.content.0` has the type 'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [IMAGE]}]}]},
         "'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]},
         "'tool_use'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "text: field required"),
        ({"messages": []}, "at least 1 item"),
        ({"max_tokens": None}, "`max_tokens` is required"),
        ({"max_tokens": 5000}, "at most"),
        ({"temperature": 1.5}, "less than or equal to 1"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "`tool_choice.name`"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "other"}}, "'other'"),
        ({"thinking": {"type": "enabled"}}, "`thinking.budget_tokens` goes with"),
        ({"thinking": {"type": "enabled", "budget_tokens": 200}}, "must be less than `max_tokens`, 200"),
        ({"thinking": {"type": "enabled", "budget_tokens": 100}}, "`thinking.budget_tokens` needs"),
        ({"output_config": {"effort": "low"}}, "reads no such variable"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"max_token": 5}, "did you mean `max_tokens`?"),
        ({"system": [IMAGE]}, "`system.0` has the type 'image'"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_in_anthropics_shape(folder, body, says):
    answer = post(scripted_app(folder, "Yes.")[0], MESSAGES, ASKED | body)
    assert answer.status_code == 400 and answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error" and says in answer.json()["error"]["message"]


def test_a_model_that_does_not_reason_refuses_thinking(client):
    with pytest.raises(anthropic.BadRequestError, match="does not reason"):
        client.messages.create(model=MODEL, messages=[USER], max_tokens=9, thinking={"type": "adaptive"})
    assert client.messages.create(model=MODEL, messages=[USER], max_tokens=1, thinking={"type": "disabled"}).content


@pytest.mark.parametrize(
    ("version", "status"), [(None, 200), ("2023-06-01", 200), ("2026-10-21", 200), ("2029-01-01", 400)]
)
def test_the_version_is_known_or_absent(folder, version, status):
    headers = None if version is None else {"anthropic-version": version}
    answer = post(scripted_app(folder, "Yes.")[0], MESSAGES, ASKED, headers)
    assert answer.status_code == status
    assert status == 200 or "2023-06-01" in answer.json()["error"]["message"]
