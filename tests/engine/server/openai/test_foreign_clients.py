"""What clients of vLLM and of the newer OpenAI schemas send and read: fields that are null, refusals, allowed tools."""

import json

import httpx
import openai
import pytest

from sojourn.engine.config import model_folder
from sojourn.engine.token.text.template import ChatTemplate
from tests.engine.server.openai.test_tools import WEATHER, tool, valid

MODEL = "tiny-model"
MESSAGES = [{"role": "user", "content": "Return a list"}]
# The order of keys, the null and `strict` are as some client sends them.
SENT = [
    {"function": {"strict": True, "parameters": WEATHER, "name": "weather"}, "type": "function"},
    {"type": "function", "function": {"name": "time", "description": None}},
]


@pytest.fixture(scope="module")
def client(api_server):
    return openai.OpenAI(base_url=f"{api_server.url}/v1", api_key="unused", max_retries=0)


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize(("include", "counts"), [(True, True), (False, False), (None, False)])
def test_usage_on_every_chunk_needs_include_usage(api_server, path, include, counts):
    options = {"continuous_usage_stats": True} | ({} if include is None else {"include_usage": include})
    asked = {"messages": MESSAGES} if "chat" in path else {"prompt": "The"}
    body = {"model": MODEL, "max_tokens": 64, "ignore_eos": True, "stream": True, "stream_options": options} | asked
    page = httpx.post(f"{api_server.url}/v1/{path}", json=body).text
    chunks = [json.loads(line.removeprefix("data: ")) for line in page.split("\n\n") if "{" in line]
    # A chunk may hold the tokens of several steps.
    assert len(chunks) >= 3 and {"usage" in chunk for chunk in chunks} == {counts}


def test_fields_that_vllm_always_has_are_attributes(client):
    chat = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=2)
    choice = chat.choices[0]
    for value in (chat.prompt_logprobs, chat.prompt_token_ids, chat.kv_transfer_params, chat.service_tier):
        assert value is None
    for value in (choice.stop_reason, choice.token_ids, choice.message.refusal, choice.message.annotations):
        assert value is None
    completion = client.completions.create(model=MODEL, prompt="The", max_tokens=2)
    choice = completion.choices[0]
    for value in (choice.stop_reason, choice.token_ids, choice.prompt_logprobs, choice.prompt_token_ids):
        assert value is None
    assert completion.kv_transfer_params is None and completion.service_tier is None


@pytest.mark.parametrize(("max_tokens", "has_gap"), [(1, False), (2, True)])
def test_one_token_has_no_latency_between_tokens(client, max_tokens, has_gap):
    asked = {"prompt": "The", "max_tokens": max_tokens, "extra_body": {"ignore_eos": True}}
    metrics = client.completions.create(model=MODEL, **asked).metrics
    assert ("mean_itl_ms" in metrics) is has_gap and metrics["generation_time_ms"] >= 0


def prompt_of(server, **body) -> str:
    ids = httpx.post(f"{server.url}/tokenize", json=body).raise_for_status().json()["tokens"]
    return httpx.post(f"{server.url}/detokenize", json={"tokens": ids}).json()["prompt"]


@pytest.mark.parametrize(
    "refused",
    [{"content": [{"type": "refusal", "refusal": "I cannot."}]}, {"refusal": "I cannot."},
     {"content": None, "refusal": "I cannot.", "annotations": []}],
    ids=["part", "alone", "as-answered"],
)  # fmt: skip
def test_a_refusal_is_the_text_of_its_turn(api_server, refused):
    turns = [*MESSAGES, {"role": "assistant"} | refused, *MESSAGES]
    said = [*MESSAGES, {"role": "assistant", "content": "I cannot."}, *MESSAGES]
    assert prompt_of(api_server, messages=turns) == prompt_of(api_server, messages=said)


def test_only_the_assistant_refuses(api_server):
    part = {"type": "refusal", "refusal": "no"}
    for message in ({"role": "user", "content": [part]}, {"role": "user", "content": "x", "refusal": "no"}):
        answer = httpx.post(f"{api_server.url}/v1/chat/completions", json={"model": MODEL, "messages": [message]})
        assert answer.status_code == 400 and "only the assistant refuses" in answer.json()["error"]["message"]


def test_responses_take_refusals_too(api_server):
    item = {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot."}]}
    body = {"model": MODEL, "input": [{"role": "user", "content": "x"}, item], "max_output_tokens": 1}
    assert httpx.post(f"{api_server.url}/v1/responses", json=body).status_code == 200


def allowed(mode: str, *names: str) -> dict:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


TOOLS = [tool("weather"), tool("time", None), tool("news", None)]


def test_allowed_tools_are_the_only_ones_that_are_called_and_all_are_shown(client):
    asked = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "max_tokens": 200, "temperature": 1.5}
    asked["extra_body"] = {"top_k": 0}
    answer = client.chat.completions.create(**asked, tool_choice=allowed("required", "time", "weather"), n=6, seed=1)
    calls = [call for choice in answer.choices for call in choice.message.tool_calls]
    assert {call.function.name for call in calls} == {"weather", "time"}
    assert all(valid(call) for choice in answer.choices[:1] for call in choice.message.tool_calls)
    required = client.chat.completions.create(**asked | {"max_tokens": 1}, tool_choice="required").usage
    assert answer.usage.prompt_tokens == required.prompt_tokens
    free = client.chat.completions.create(**asked | {"max_tokens": 12}, tool_choice=allowed("auto", "time"))
    assert free.choices[0].message.tool_calls is None and free.choices[0].message.content


def test_responses_have_allowed_tools_in_their_own_form(client):
    tools = [{"type": "function", "name": name, "parameters": None, "strict": False} for name in ("time", "news")]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "news"}]}
    answer = client.responses.create(
        model=MODEL, input="x", tools=tools, tool_choice=choice, max_output_tokens=100, parallel_tool_calls=False
    )
    assert [item.name for item in answer.output] == ["news"] and answer.tool_choice.to_dict() == choice


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        (allowed("required", "other"), "'other', which is none of the `tools`"),
        (allowed("none", "time"), "'auto' or 'required'"),
        (allowed("auto"), "at least 1 item"),
        ({"type": "allowed_tools"}, "allowed_tools"),
    ],
    ids=["unknown", "mode", "empty", "nothing"],
)
def test_allowed_tools_that_cannot_be_are_refused(api_server, choice, says):
    body = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice}
    answer = httpx.post(f"{api_server.url}/v1/chat/completions", json=body)
    assert answer.status_code == 400 and says in answer.json()["error"]["message"]


def test_tools_are_shown_as_they_were_sent(api_server):
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_folder("tiny-model"))

    def ids_of(tools: list[dict]) -> list[int]:
        return tokenizer.apply_chat_template(MESSAGES, tools=tools, add_generation_prompt=True)["input_ids"]

    ids = ids_of(SENT)
    body = {"messages": MESSAGES, "tools": SENT}
    assert httpx.post(f"{api_server.url}/tokenize", json=body).json()["tokens"] == ids
    asked = {"model": MODEL, "max_tokens": 1} | body
    used = httpx.post(f"{api_server.url}/v1/chat/completions", json=asked).json()["usage"]
    assert used["prompt_tokens"] == len(ids)
    items = [{"type": "function"} | sent["function"] for sent in SENT]
    asked = {"model": MODEL, "input": "Return a list", "tools": items, "max_output_tokens": 1}
    used = httpx.post(f"{api_server.url}/v1/responses", json=asked).json()["usage"]
    assert used["input_tokens"] == len(ids_of([{"type": "function", "function": sent["function"]} for sent in SENT]))


BEFORE_TOOLS = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.mark.parametrize("roles", ["u", "su", "sua", "suau", "uu", "s"])
def test_the_bundled_template_renders_chats_without_tools_as_it_always_did(tmp_path, roles):
    (tmp_path / "chat_template.jinja").write_text(BEFORE_TOOLS, encoding="utf-8")
    before, now = ChatTemplate(tmp_path), ChatTemplate(model_folder("tiny-model"))
    names = {"s": "system", "u": "user", "a": "assistant"}
    messages = [{"role": names[role], "content": f" {index}\n<x>{{{{ y }}}}\n"} for index, role in enumerate(roles)]
    for options in ({}, {"add_generation_prompt": False}, {"tools": []}):
        assert now.render(messages, **options) == before.render(messages, **options)
