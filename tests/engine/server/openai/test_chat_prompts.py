"""Chats as clients send them: the prompt that transformers makes of them, where it makes one."""
# ruff: noqa: E501

import asyncio
import json
import shutil
from typing import Any

import pytest

from sojourn.engine.config import model_folder
from sojourn.engine.server.errors import ApiError
from sojourn.engine.server.openai.messages import Message, TemplateFields
from sojourn.engine.server.openai.prompts import ModelLimits, PromptEncoder
from sojourn.engine.token.text.template import ChatTemplate
from sojourn.engine.token.text.tokenizer import Tokenizer
from tests.engine.token.text.template_oracle import CHATS, REFUSED, TOOLS, Oracle

EACH = "{% for m in messages %}<{{ m.role }}>"
CALLS = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}{{ tools | tojson if tools }}"
PARTS = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}({{ p.text }}){% endfor %}{% endif %}"
)
TEMPLATES = {
    "content where there is one": EACH + "{% if 'content' in m %}{{ m.content }}{% else %}-{% endif %}" + CALLS,
    "parts": EACH + PARTS + "{{ m.reasoning_content }}" + CALLS,
}
BOTH = TEMPLATES["parts"]


@pytest.fixture(scope="module")
def oracle():
    return Oracle()


@pytest.fixture
def prompt_of(tmp_path):
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(model_folder("tiny-model") / name, tmp_path)

    def render(source: str, messages: list[dict[str, Any]], tools: Any = None, **fields: Any) -> str:
        (tmp_path / "chat_template.jinja").write_text(source)
        encoder = PromptEncoder(Tokenizer(tmp_path), ChatTemplate(tmp_path))
        fields = {"add_generation_prompt": not fields.get("continue_final_message")} | fields
        coroutine = encoder.encode_chat(
            [Message.model_validate(as_sent(message)) for message in messages],
            TemplateFields.model_validate(fields), ModelLimits(100_000, "it is so"), tools=tools,
        )  # fmt: skip
        return asyncio.run(coroutine).text

    return render


def as_sent(message: dict[str, Any]) -> dict[str, Any]:
    """Over HTTP the arguments of calls are a text."""
    if "tool_calls" not in message:
        return message
    calls = [call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
             for call in message["tool_calls"]]  # fmt: skip
    return message | {"tool_calls": calls}


@pytest.mark.parametrize("chat", [name for name in CHATS if name not in ("developer", "thoughts in the text")])
@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
def test_a_chat_of_a_client_is_the_prompt_of_transformers(oracle, prompt_of, source, chat):
    messages, options = CHATS[chat]
    if chat == "parts" and source != BOTH:
        messages = [message | {"content": "".join(p["text"] for p in message["content"])} for message in messages]
    expected = oracle.says(source, messages, **options)
    assert expected is not REFUSED and prompt_of(source, messages, **options) == expected


@pytest.mark.parametrize("shown", ["{{ m.content + '' }}", "{{ m.content | trim if m.content is string else 1 / 0 }}"])
def test_a_template_that_fails_on_calls_without_content_gets_an_empty_one(prompt_of, shown):
    messages, options = CHATS["calls with null"]
    text = prompt_of(EACH + shown + CALLS, messages, **options)
    assert "<assistant>tide{" in text and "None" not in text


@pytest.mark.parametrize("content", ["Hi there", [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]])
@pytest.mark.parametrize(
    ("shown", "text"),
    [
        ("{{ m.content }}", "Hi there"),
        ("{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}", "Hi there"),
    ],
    ids=["reads a text", "reads parts only"],
)
def test_no_text_is_lost_on_a_template_that_reads_the_other_form(prompt_of, shown, text, content):
    assert prompt_of(EACH + shown + "{% endfor %}", [{"role": "user", "content": content}]) == f"<user>{text}"


def test_a_chat_on_which_the_template_does_not_end_is_refused_and_the_next_is_rendered(prompt_of, monkeypatch):
    monkeypatch.setattr("sojourn.engine.token.text.template.CPU_SECONDS", 0.2)
    loop = "{% if tools and messages | length > 3 %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    messages = CHATS["several calls"][0]
    with pytest.raises(ApiError, match=r"takes more than 0\.2 s of CPU time") as refused:
        prompt_of(loop + BOTH, messages, TOOLS)
    assert refused.value.status == 400
    assert prompt_of(loop + BOTH, messages[:1], TOOLS).startswith("<user>How high")
