"""Tools in chats, from outside: forced calls are valid even from a model that was never trained on them."""

import json

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from sojourn.engine.config import EngineConfig, model_folder
from sojourn.engine.server.errors import ApiError
from sojourn.engine.server.openai.tools import ChatTool, plan_tools
from sojourn.engine.token.text.template import ChatTemplate
from sojourn.engine.token.text.tokenizer import Tokenizer
from sojourn.engine.token.tools.calls import FORMATS, ToolCallParser
from tests.engine.token.tools.test_calls import tokenizer_with

MODEL = "tiny-model"
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Graz", "Linz"]}, "metric": {"type": "boolean"}},
    "required": ["city", "metric"],
    "additionalProperties": False,
}


def tool(name: str, parameters: dict | None = WEATHER, **more) -> dict:
    described = {"name": name, "description": f"tells the {name}"} | more
    return {"type": "function", "function": described | ({} if parameters is None else {"parameters": parameters})}


ASKED = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "How is the weather?"}],
    "tools": [tool("weather"), tool("time", None)],
    "max_tokens": 200,
    "seed": 3,
}


@pytest.fixture(scope="module")
def client(tool_server):
    return openai.OpenAI(base_url=f"{tool_server.url}/v1", api_key="unused", max_retries=0)


def valid(call) -> bool:
    values = json.loads(call.function.arguments)
    if call.function.name == "time":
        return values == {}
    known = values["city"] in ("Graz", "Linz") and type(values["metric"]) is bool
    return call.function.name == "weather" and known and len(values) == 2


def gathered(chunks: list[ChatCompletionChunk]) -> tuple[str, list[tuple[str, str]], str]:
    """(content, calls, finish reason) of a stream, each chunk in the official shape."""
    content, calls, reason = "", [], None
    for chunk in chunks:
        ChatCompletionChunk.model_validate_json(chunk.model_dump_json(), strict=True)
        for choice in chunk.choices:
            assert reason is None, "nothing comes after the end"
            content += choice.delta.content or ""
            reason = choice.finish_reason
            for delta in choice.delta.tool_calls or []:
                if delta.id is not None:
                    assert delta.index == len(calls) and delta.type == "function" and delta.function.name
                    calls.append([delta.function.name, ""])
                else:
                    assert delta.function.name is None and delta.index == len(calls) - 1
                calls[delta.index][1] += delta.function.arguments
    return content, [tuple(call) for call in calls], reason


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str)
def test_a_forced_call_is_valid_whole_and_streamed(client, choice):
    whole = client.chat.completions.create(**ASKED, tool_choice=choice)
    ChatCompletion.model_validate_json(whole.model_dump_json(), strict=True)
    message = whole.choices[0].message
    assert message.content is None and whole.choices[0].finish_reason == "tool_calls"
    assert message.tool_calls and all(valid(call) for call in message.tool_calls)
    if choice != "required":
        assert [call.function.name for call in message.tool_calls] == ["weather"]
    assert len({call.id for call in message.tool_calls}) == len(message.tool_calls)
    content, calls, reason = gathered(list(client.chat.completions.create(**ASKED, tool_choice=choice, stream=True)))
    assert calls == [(call.function.name, call.function.arguments) for call in message.tool_calls]
    assert content == "" and reason == "tool_calls"


def test_parallel_calls_come_unless_they_are_forbidden(client):
    numbers = {}
    for parallel in (True, False):
        answers = client.chat.completions.create(
            **ASKED | {"max_tokens": 400}, tool_choice="required", parallel_tool_calls=parallel, n=6, temperature=1.5,
            logit_bias={"2": -6},  # the end of the turn
        )  # fmt: skip
        numbers[parallel] = [len(choice.message.tool_calls) for choice in answers.choices]
        for choice in answers.choices:
            assert choice.finish_reason == "length" or all(valid(call) for call in choice.message.tool_calls)
    assert set(numbers[False]) == {1} and max(numbers[True]) > 1


SUNNY = {
    "type": "object",
    "properties": {"sunny": {"type": "boolean"}},
    "required": ["sunny"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": SUNNY}}


@pytest.mark.parametrize("choice", ["auto", "required", "none"])
def test_an_answer_beside_tools_follows_its_schema(client, choice):
    asked = ASKED | {"response_format": FORMAT, "tool_choice": choice, "temperature": 1.2, "n": 8}
    kinds = set()
    for answer in client.chat.completions.create(**asked).choices:
        calls = answer.message.tool_calls
        kinds.add("call" if calls else "answer")
        assert (
            all(valid(call) for call in calls) if calls else type(json.loads(answer.message.content)["sunny"]) is bool
        )
    assert kinds == {"auto": kinds, "required": {"call"}, "none": {"answer"}}[choice]


def test_the_limit_ends_a_call_with_length(client):
    answer = client.chat.completions.create(**ASKED | {"max_tokens": 25}, tool_choice="required").choices[0]
    assert answer.finish_reason == "length"


def test_a_model_that_may_choose_writes_text_where_it_wants_to(client):
    for tools in ([tool("weather")], [tool("weather", strict=True)]):
        asked = ASKED | {"tools": tools, "max_tokens": 20, "temperature": 0}
        whole = client.chat.completions.create(**asked).choices[0]
        assert whole.message.content and not whole.message.tool_calls and whole.finish_reason in ("stop", "length")
        content, calls, reason = gathered(list(client.chat.completions.create(**asked, stream=True)))
        assert (content, calls, reason) == (whole.message.content, [], whole.finish_reason)


def test_text_that_looks_like_a_call_is_given_as_it_is(client):
    bias = {"logit_bias": {"31": 100}}  # "<", the beginning of <tool_call>, and nothing else
    whole = client.chat.completions.create(**ASKED | {"max_tokens": 8}, **bias).choices[0]
    assert whole.message.content == "<" * 8 and whole.finish_reason == "length"
    assert (
        gathered(list(client.chat.completions.create(**ASKED | {"max_tokens": 8}, **bias, stream=True)))[0] == "<" * 8
    )


def test_logprobs_tell_of_every_token_of_a_call(client):
    asked = ASKED | {"tool_choice": "required", "logprobs": True}
    whole = client.chat.completions.create(**asked)
    told = [entry.token for entry in whole.choices[0].logprobs.content]
    assert len(told) == whole.usage.completion_tokens
    chunks = list(client.chat.completions.create(**asked, stream=True))
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices and chunk.choices[0].logprobs]
    assert [entry.token for part in parts for entry in part.content] == told


def test_results_go_back_to_the_model(client, tool_server):
    first = client.chat.completions.create(**ASKED, tool_choice="required").choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "42 degrees"} for call in first.tool_calls]
    turns = [*ASKED["messages"], first.model_dump(), *results]
    second = client.chat.completions.create(**ASKED | {"messages": turns, "max_tokens": 5})
    assert second.choices[0].finish_reason in ("length", "stop")
    body = {"messages": turns, "tools": ASKED["tools"]}
    ids = httpx.post(f"{tool_server.url}/tokenize", json=body).json()
    assert ids["count"] == second.usage.prompt_tokens
    text = httpx.post(f"{tool_server.url}/detokenize", json={"tokens": ids["tokens"]}).json()["prompt"]
    called = first.tool_calls[0].function
    assert f'<tool_call>\n{{"name": "{called.name}", "arguments": {called.arguments}}}\n</tool_call>' in text
    assert "<result>42 degrees</result>" in text
    assert '"description": "tells the weather"' in text


def test_the_model_hears_of_no_tool_that_it_may_not_call(client):
    without = client.chat.completions.create(**ASKED | {"tools": [], "max_tokens": 1}).usage.prompt_tokens
    none = client.chat.completions.create(**ASKED | {"max_tokens": 1}, tool_choice="none").usage.prompt_tokens
    assert none == without < client.chat.completions.create(**ASKED | {"max_tokens": 1}).usage.prompt_tokens


def nested(depth: int) -> dict:
    schema = {"type": "object", "properties": {}}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"tools": [tool("a b")]}, "tools", "a b"),
        ({"tools": [tool("a" * 65)]}, "tools", "aaa"),
        ({"tools": [tool("a"), tool("a")]}, "tools", "more than once"),
        ({"tools": [tool(f"f{i}") for i in range(129)]}, "tools", "128"),
        ({"tools": [tool("a", {"type": "array"})]}, "tools", "schema of an object"),
        ({"tools": [tool("a", nested(40))]}, "tools", "nested deeper than 32"),
        ({"tools": [tool("a", {"description": "x" * 262_144})]}, "tools", "262,144"),
        ({"tools": [{"type": "web_search"}]}, "tools", "should be 'function'"),
        ({"tool_choice": "sometimes"}, "tool_choice", "sometimes"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice", "none of the `tools`"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "no `tools`"),
        ({"guided_regex": "[a-z]+"}, "guided_regex", "no JSON schema"),
        ({"tools": [tool("a", {"properties": {"x": {"type": "nothing"}}}, strict=True)]}, "tools", "nothing"),
        ({"ignore_eos": True, "tool_choice": "required"}, "ignore_eos", "tools"),
        ({"functions": [{"name": "f"}]}, "functions", "not supported"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "tool_call_id"),
        ({"messages": [{"role": "user", "content": None}]}, "messages", "left out only"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "it reads thinking"),
        ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs", "'messages'"),
        ({"chat_template_kwargs": {"thinking": [1]}}, "chat_template_kwargs", "[1]"),
        ({"continue_final_message": True}, "continue_final_message", "add_generation_prompt"),
        ({"chat_template": "{{ x }}"}, "chat_template", "not supported"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_honoured_is_refused_with_its_field(tool_server, body, param, says):
    answer = httpx.post(f"{tool_server.url}/v1/chat/completions", json=ASKED | body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and says in error["message"]


def test_a_model_whose_template_knows_no_tools_refuses_them(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    fields = {"parallel": True, "template": ChatTemplate(tmp_path), "tool_format": None, "added_tokens": {}}
    with pytest.raises(ApiError, match="knows no tools") as refused:
        plan_tools([ChatTool.model_validate(tool("f"))], None, **fields)
    assert refused.value.param == "tools"


@pytest.mark.parametrize(
    "arguments", ['{"a": "\\ud800"}', "[1]", "{", '{"a": ' * 5000, '{"a": ' + "9" * 5000 + "}", '"x"'], ids=len
)
def test_arguments_that_no_template_can_show_are_refused(tool_server, arguments):
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    answer = httpx.post(f"{tool_server.url}/v1/chat/completions", json=ASKED | {"messages": messages})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages"


@pytest.mark.parametrize(
    ("more", "end"),
    [
        ({}, "<|im_start|>assistant\n"),
        ({"chat_template_kwargs": {"thinking": True}}, "<|im_start|>assistant\n<think>"),
        ({"add_generation_prompt": False}, "<|im_start|>assistant\nI sing <|im_end|>\n"),
        ({"add_generation_prompt": False, "continue_final_message": True}, "<|im_start|>assistant\nI sing "),
    ],
    ids=str,
)
def test_the_prompt_ends_as_asked_in_tokenize_and_in_chat(tool_server, client, more, end):
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "I sing "}]
    asked = httpx.post(f"{tool_server.url}/tokenize", json={"messages": messages} | more).json()
    shown = httpx.post(f"{tool_server.url}/detokenize", json={"tokens": asked["tokens"]}).json()["prompt"]
    assert shown.endswith(end)
    used = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1, extra_body=more).usage
    assert used.prompt_tokens == asked["count"] == len(asked["tokens"])


def test_tokenize_and_detokenize_are_each_others_inverse(tool_server):
    text = "Ünïcode \N{PARTY POPPER} <|im_start|>x"
    body = {"prompt": text, "return_token_strs": True}
    asked = httpx.post(f"{tool_server.url}/tokenize", json=body).json()
    assert httpx.post(f"{tool_server.url}/detokenize", json={"tokens": asked["tokens"]}).json() == {"prompt": text}
    assert len(asked["token_strs"]) == asked["count"] and "<|im_start|>" in asked["token_strs"]
    assert httpx.post(f"{tool_server.url}/tokenize", json={"prompt": text}).json()["token_strs"] is None
    for bad, param in (([99999], "tokens"), (["a"], "tokens"), ([-1], "tokens"), (None, "tokens")):
        answer = httpx.post(f"{tool_server.url}/detokenize", json={"tokens": bad})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    assert httpx.post(f"{tool_server.url}/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_version_and_model_are_told(tool_server):
    assert httpx.get(f"{tool_server.url}/version").json()["version"][0].isdigit()
    assert httpx.get(f"{tool_server.url}/v1/models/{MODEL}").json()["id"] == MODEL
    assert httpx.get(f"{tool_server.url}/v1/models/other").status_code == 404


def test_the_engine_option_says_the_format_where_the_template_does_not(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{{ tools }}", encoding="utf-8")
    fields = {"choice": "required", "parallel": True, "template": ChatTemplate(tmp_path), "added_tokens": {}}
    with pytest.raises(ApiError, match="tool_format"):
        plan_tools([ChatTool.model_validate(tool("f"))], tool_format=None, **fields)
    assert (
        plan_tools([ChatTool.model_validate(tool("f"))], tool_format="mistral", **fields).format is FORMATS["mistral"]
    )
    for name in FORMATS:
        assert EngineConfig(model="x", tool_format=name).tool_format == name


def test_special_tokens_that_mark_calls_are_seen_and_others_are_not(tmp_path):
    described, ids = tokenizer_with(["[TOOL_CALLS]", "[OTHER]"])
    (tmp_path / "tokenizer.json").write_text(described, encoding="utf-8")
    (tmp_path / "config.json").symlink_to(model_folder("tiny-model").resolve() / "config.json")
    (tmp_path / "chat_template.jinja").write_text("{% if tools %}{% endif %}[TOOL_CALLS]", encoding="utf-8")
    tokenizer, offered = Tokenizer(tmp_path), [ChatTool.model_validate(tool("f", {"type": "object"}))]
    plan = plan_tools(
        offered, "auto", parallel=True, template=ChatTemplate(tmp_path), tool_format=None,
        added_tokens=tokenizer.added_tokens,
    )  # fmt: skip
    assert plan.shown_token_ids == {ids["[TOOL_CALLS]"]}
    written = '[TOOL_CALLS] [{"name": "f", "arguments": {}}]'
    tokens = [ids["[OTHER]"], *tokenizer.encode(written), 2]
    stream, parser = tokenizer.stream(shown_token_ids=plan.shown_token_ids), ToolCallParser(plan.format, plan.names)
    texts = [stream.push(token) for token in tokens]
    assert "".join(texts) == written
    assert [delta.name for text in texts for delta in parser.push(text) if delta.name] == ["f"]
    hidden = tokenizer.stream()
    assert "".join(hidden.push(token) for token in tokens) == written.removeprefix("[TOOL_CALLS]")
