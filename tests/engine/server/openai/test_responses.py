"""POST /v1/responses from outside: openai's own client, every event in the official shape, and what is refused."""

import json
import os
import signal

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.engine.server.openai.test_tools import WEATHER, valid
from tests.engine.server_process import wait_for

# ruff: noqa: E501

MODEL = "tiny-model"
EVENT = TypeAdapter(ResponseStreamEvent)
TOOLS = [
    {"type": "function", "name": "weather", "description": "tells the weather", "parameters": WEATHER, "strict": True},
    {"type": "function", "name": "time", "parameters": None, "strict": False},
]


@pytest.fixture(scope="module")
def client(tool_server):
    return openai.OpenAI(base_url=f"{tool_server.url}/v1", api_key="unused", max_retries=0)


@pytest.fixture(scope="module")
def ask(tool_server):
    """A response, checked against the official types."""

    def post(**body) -> dict:
        answer = httpx.post(f"{tool_server.url}/v1/responses", json={"model": MODEL} | body, timeout=30)
        assert answer.status_code == 200, answer.text
        Response.model_validate_json(answer.content, strict=True)
        return answer.json()

    return post


@pytest.fixture(scope="module")
def events_of(tool_server):
    """The events of a streamed response, each checked against the official types, and its name against its data."""

    def stream(**body) -> list[dict]:
        body = {"model": MODEL, "stream": True} | body
        page = httpx.post(f"{tool_server.url}/v1/responses", json=body, timeout=30).text
        *written, done, rest = page.split("\n\n")
        assert done == "data: [DONE]" and rest == ""
        events = []
        for index, lines in enumerate(written):
            name, data = lines.split("\n")
            event = json.loads(data.removeprefix("data: "))
            EVENT.validate_python(event)
            assert name == f"event: {event['type']}" and event["sequence_number"] == index
            events.append(event)
        return events

    return stream


def replayed(events: list[dict]) -> list[dict]:
    """The output that the events tell piece by piece; checks that each stands where it may."""
    output: list[dict] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(output) and event["item"]["status"] == "in_progress"
            assert not output or output[-1]["status"] == "completed", "one item grows at a time"
            output.append(event["item"])
        elif kind == "content_part.added":
            output[-1]["content"].append(event["part"])
        elif kind == "output_text.delta":
            output[-1]["content"][event["content_index"]]["text"] += event["delta"]
            output[-1]["content"][event["content_index"]]["logprobs"] += event["logprobs"]
        elif kind == "function_call_arguments.delta":
            output[-1]["arguments"] += event["delta"]
        elif kind == "output_text.done":
            assert output[-1]["content"][0]["text"] == event["text"]
        elif kind == "content_part.done":
            assert output[-1]["content"][0] == event["part"]
        elif kind == "function_call_arguments.done":
            assert output[-1]["arguments"] == event["arguments"]
        elif kind == "output_item.done":
            status = event["item"]["status"]
            assert output[-1] | {"status": status} == event["item"] and status != "in_progress"
            output[-1] = event["item"]
        if "item_id" in event:
            assert event["item_id"] == output[-1]["id"] and event["output_index"] == len(output) - 1
    return output


def text_of(response: dict) -> str:
    parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    return "".join(part["text"] for part in parts)


def chat(server, **body) -> dict:
    return httpx.post(f"{server.url}/v1/chat/completions", json={"model": MODEL, "temperature": 0} | body).json()


def test_a_text_gives_what_the_same_chat_gives(ask, tool_server):
    response = ask(input="Return a list", temperature=0, max_output_tokens=16)
    same = chat(tool_server, messages=[{"role": "user", "content": "Return a list"}], max_tokens=16)
    assert text_of(response) == same["choices"][0]["message"]["content"]
    assert response["usage"]["input_tokens"] == same["usage"]["prompt_tokens"]
    assert response["usage"]["output_tokens"] == same["usage"]["completion_tokens"]
    ended = same["choices"][0]["finish_reason"] == "stop"
    assert response["status"] == ("completed" if ended else "incomplete")


def test_the_limit_makes_a_response_incomplete(ask):
    response = ask(input="Return", max_output_tokens=3, ignore_eos=True)
    assert response["status"] == "incomplete" and response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][-1]["status"] == "incomplete" and response["completed_at"] is None


def test_instructions_and_earlier_turns_are_the_messages_of_a_chat(ask, tool_server):
    turns = [
        {"role": "user", "content": [{"type": "input_text", "text": "My name is "}, {"type": "input_text", "text": "A"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello", "annotations": []}]},
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": '{"city": "Graz"}', "status": "completed"},
        {"type": "function_call", "call_id": "2", "name": "time", "arguments": "{}", "id": "fc_2"},
        {"type": "function_call_output", "call_id": "1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "noon"}]},
        {"role": "developer", "content": "Be kind"},
    ]  # fmt: skip
    calls = [
        {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, name, arguments in (("1", "weather", '{"city": "Graz"}'), ("2", "time", "{}"))
    ]
    messages = [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "My name is A"},
        {"role": "assistant", "content": "Hello", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "2", "content": "noon"},
        {"role": "developer", "content": "Be kind"},
    ]
    response = ask(input=turns, instructions="Be brief", temperature=0, max_output_tokens=8)
    same = chat(tool_server, messages=messages, max_tokens=8)
    assert text_of(response) == same["choices"][0]["message"]["content"]
    assert response["usage"]["input_tokens"] == same["usage"]["prompt_tokens"]
    assert response["instructions"] == "Be brief"


def test_an_answer_goes_back_as_it_came(client):
    first = client.responses.create(model=MODEL, input="Return a list", max_output_tokens=8)
    turns = [{"role": "user", "content": "Return a list"}, *[item.model_dump() for item in first.output]]
    again = client.responses.create(
        model=MODEL, input=[*turns, {"role": "user", "content": "More"}], max_output_tokens=4
    )
    assert again.usage.input_tokens > first.usage.input_tokens
    assert again.usage.input_tokens_details.cached_tokens > 0


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}], ids=str)
def test_a_forced_call_is_valid_whole_and_streamed(ask, events_of, choice):
    body = dict(input="Weather?", tools=TOOLS, tool_choice=choice, max_output_tokens=300, seed=4)
    whole, events = ask(**body), events_of(**body)
    calls = Response.model_validate(whole).output
    assert calls and all(call.type == "function_call" for call in calls) and whole["status"] == "completed"
    for call in calls:
        call.function = call
        assert valid(call)
    told = [(item["name"], item["arguments"]) for item in replayed(events)]
    assert told == [(call.name, call.arguments) for call in calls]
    assert whole["tool_choice"] == choice and [tool["name"] for tool in whole["tools"]] == ["weather", "time"]


def test_several_calls_are_several_items(ask, events_of):
    body = dict(input="When?", tools=TOOLS[1:], tool_choice="required", max_output_tokens=200)
    body |= {"logit_bias": {"2": -6}}  # the end of the turn
    several = next(seed for seed in range(20) if len(ask(**body, seed=seed)["output"]) > 1)
    whole, told = ask(**body, seed=several)["output"], replayed(events_of(**body, seed=several))
    assert [(c["name"], c["arguments"]) for c in told] == [(c["name"], c["arguments"]) for c in whole]
    assert len({call["call_id"] for call in told}) == len({call["id"] for call in told}) == len(told)


def test_a_stream_tells_how_the_same_response_grows(ask, events_of):
    body = dict(input="Return a list", temperature=0, max_output_tokens=12, ignore_eos=True)
    body |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "metadata": {"run": "7"}}
    whole, events = ask(**body), events_of(**body)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []
    final = events[-1]["response"]
    assert final["output"] == replayed(events) and text_of(final) == text_of(whole)
    changing = {"id", "created_at", "completed_at", "output", "ledger", "metrics", "usage"}
    assert {k: v for k, v in final.items() if k not in changing} == {
        k: v for k, v in whole.items() if k not in changing
    }
    assert final["metadata"] == {"run": "7"} and final["usage"]["output_tokens"] == 12
    for response in (final, whole):
        entries = response["output"][0]["content"][0]["logprobs"]
        assert len(entries) == 12 and all(len(entry["top_logprobs"]) == 2 for entry in entries)
        assert "".join(entry["token"] for entry in entries) == text_of(response)


def test_text_follows_its_schema_whole_and_streamed(ask, events_of):
    schema = {
        "type": "object",
        "properties": {"unit": {"enum": ["km", "mi"]}},
        "required": ["unit"],
        "additionalProperties": False,
    }
    shape = {"type": "json_schema", "name": "unit", "schema": schema, "strict": True}
    body = dict(input="Which?", text={"format": shape}, max_output_tokens=200, seed=1)
    whole = ask(**body)
    assert json.loads(text_of(whole))["unit"] in ("km", "mi") and whole["status"] == "completed"
    assert whole["text"]["format"] == shape
    assert replayed(events_of(**body))[0]["content"][0]["text"] == text_of(whole)
    assert text_of(ask(input="x", text={"format": {"type": "json_object"}}, max_output_tokens=20))[0] == "{"


def test_openai_streams_to_the_same_final_response(client):
    asked = dict(model=MODEL, input="Return", temperature=0, tools=TOOLS, tool_choice="required", max_output_tokens=300)
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    assert [call.arguments for call in final.output] == [call.arguments for call in whole.output]
    assert "".join(deltas) == "".join(call.arguments for call in whole.output)


def test_usage_counts_what_the_cache_gave_and_took(ask):
    prompt = "A prompt of some length, " * 8
    first = ask(input=prompt, max_output_tokens=1, cache_salt="usage")["usage"]
    second = ask(input=prompt, max_output_tokens=1, cache_salt="usage")["usage"]
    size = first["input_tokens"]
    assert first["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": size // 16 * 16}
    assert second["input_tokens_details"] == {"cached_tokens": (size - 1) // 16 * 16, "cache_write_tokens": 0}
    assert first["total_tokens"] == size + first["output_tokens"]


IMAGE = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]}]


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"input": IMAGE}, "input", "reads text only"),
        ({"input": []}, "input", "at least 1"),
        ({"input": 7}, "input", "7"),
        ({"input": None}, "input", "required"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "'item_reference'"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input", "encrypted_content"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input", "input[0]"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "[]"}]}, "input", "json of an obj"),
        ({"input": [{"type": ["x"]}]}, "input", "['x']"),
        ({"store": True}, "store", "stored"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "earlier turns"),
        ({"conversation": "conv_1"}, "conversation", "earlier turns"),
        ({"background": True}, "background", "stored"),
        ({"truncation": "auto"}, "truncation", "disabled"),
        ({"reasoning": {"effort": "high"}}, "reasoning", "`reasoning`='high'"),
        ({"tools": [{"type": "web_search"}]}, "tools", "'function'"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "more than once"),
        ({"tool_choice": "required"}, "tool_choice", "no `tools`"),
        ({"tool_choice": {"type": "function", "name": "other"}, "tools": TOOLS}, "tool_choice", "none of the `tools`"),
        ({"max_output_tokens": 0}, "max_output_tokens", "0"),
        ({"max_output_tokens": 5000}, "max_output_tokens", "at most"),
        ({"input": "x " * 3000}, "input", "max_model_len"),
        ({"top_logprobs": 3}, "top_logprobs", "include"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text", "schema"),
        ({"text": {"format": {"type": "yaml"}}}, "text", "yaml"),
        ({"response_format": {"type": "json_object"}}, "response_format", "json_object"),
        ({"n": 2}, "n", "2"),
        ({"text": {"verbosity": "high"}}, "text", "high"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options", "True"),
        ({"include": ["file_search_call.results"]}, "include", "file_search"),
        ({"temprature": 1}, "temprature", "not a field that this server knows; did you mean `temperature`?"),
        ({"x" * 100_000: 1}, "x" * 80, "leave it out"),
        ({"metadata": {"a": 1}}, "metadata", "1"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_with_its_field(tool_server, body, param, says):
    answer = httpx.post(f"{tool_server.url}/v1/responses", json={"model": MODEL, "input": "x"} | body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param and says in error["message"]


def test_fields_that_ask_for_nothing_pass(ask):
    answer = ask(
        input="x", max_output_tokens=1, store=False, background=False, previous_response_id=None, truncation="disabled",
        reasoning={"effort": None, "summary": None}, service_tier="auto", tool_choice="auto", tools=[], include=[],
        text={"format": {"type": "text"}, "verbosity": "medium"}, prompt_cache_key="k", safety_identifier="me",
    )  # fmt: skip
    assert answer["usage"]["output_tokens"] == 1


def finished(server, outcome: str) -> float:
    page = httpx.get(f"{server.url}/metrics").text
    wanted = f'sojourn_request_finished_total{{model_name="{MODEL}",outcome="{outcome}"}}'
    return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(wanted))


def test_a_response_is_recorded_and_given_up_with_its_client(client, tool_server, ask):
    before, aborted = finished(tool_server, "length"), finished(tool_server, "abort")
    ask(input="Return", max_output_tokens=2, ignore_eos=True)
    assert wait_for(lambda: finished(tool_server, "length") == before + 1)
    stream = client.responses.create(model=MODEL, input="Go on", stream=True, extra_body={"ignore_eos": True})
    for event in stream:
        if event.type == "response.output_text.delta":
            break
    stream.close()
    assert wait_for(lambda: finished(tool_server, "abort") == aborted + 1)


def test_a_stream_whose_core_dies_ends_with_a_failed_response(tool_server):
    body = {"model": MODEL, "input": "Go on", "stream": True, "ignore_eos": True}
    events = []
    with httpx.stream("POST", f"{tool_server.url}/v1/responses", json=body, timeout=30) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                assert line != "data: [DONE]"
                events.append(json.loads(line.removeprefix("data: ")))
                if len(events) == 6:
                    os.kill(tool_server.core_pid(), signal.SIGKILL)
    last = events[-1]
    EVENT.validate_python(last)
    assert last["type"] == "response.failed" and last["sequence_number"] == len(events) - 1
    assert last["response"]["status"] == "failed" and "core died" in last["response"]["error"]["message"]
    tool_server.wait_ready()
