"""What transformers makes of a template and a chat, and twelve chats with all that clients send."""

import json
import re
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from sojourn.engine.config import model_folder
from sojourn.engine.token.text.template import ChatTemplate, TemplateError
from sojourn.metrics.errors import ModelError

NOW = datetime(2026, 3, 4, 5, 6, 7)
TOKENS = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
}
REFUSED = None

_SCHEMA = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "description": "it's <b>“é”</b> & more"},
        "days": {"type": ["integer", "null"], "enum": [1, 2, None], "default": 1},
        "box": {"type": "array", "items": {"type": "number"}},
    },
    "required": ["place"],
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": f"does {name}", "parameters": _SCHEMA}}
    for name in ("tide", "wind")
]


def _call(number: int, name: str = "tide", **arguments: Any) -> dict[str, Any]:
    return {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": arguments}}


def _result(number: int, text: str, name: str = "tide") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call{number:05}", "name": name, "content": text}


def _user(content: Any = "How high is the tide?") -> dict[str, Any]:
    return {"role": "user", "content": content}


def _said(content: Any = "Two metres.", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


SYSTEM = {"role": "system", "content": " Be brief.\n"}
_ASKED = [_user(), _said(None, tool_calls=[_call(1, place="Graz <é>", days=None, box=[1.0, 2.5e20])])]
_PARTS = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]

# Name → messages and options.
CHATS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "user": ([_user()], {}),
    "system": ([SYSTEM, _user("a <b> 'c' \"d\" ☃\n")], {}),
    "turns": ([_user("one"), _said("two"), _user(" three ")], {}),
    "no generation prompt": ([SYSTEM, _user(), _said()], {"add_generation_prompt": False}),
    "developer": ([{"role": "developer", "content": "Be kind."}, _user()], {}),
    "tools": ([SYSTEM, _user()], {"tools": TOOLS}),
    "calls with null": ([*_ASKED, _result(1, '{"metres": 2.0}')], {"tools": TOOLS}),
    "several calls": (
        [_user(), _said("I look.", tool_calls=[_call(1), _call(2, "wind", place="x")]), _result(1, "2"),
         _result(2, "calm", "wind"), _said("Calm."), _user("Thanks")],
        {"tools": TOOLS[:1]},
    ),
    "reasoning": ([_user(), _said(reasoning_content="Hm.\n"), _user("And?"), *_ASKED, _result(1, "")], {}),
    "thoughts in the text": ([_user(), _said("<think>\nHm.\n</think>\n\n2"), _user("?")], {"enable_thinking": False}),
    "prefill": ([_user(), _said("It is ")], {"continue_final_message": True}),
    "parts": ([{"role": "system", "content": _PARTS}, _user(_PARTS), _said(_PARTS), _user(_PARTS[:1])], {}),
}  # fmt: skip


class Oracle:
    """transformers' tokenizer, on a day that both sides share."""

    def __init__(self) -> None:
        from transformers import PreTrainedTokenizerFast

        file = model_folder("tiny-model") / "tokenizer.json"
        self._tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file), **TOKENS)

    def says(self, source: str, messages: list[dict[str, Any]], **options: Any) -> str | None:
        options = {"add_generation_prompt": not options.get("continue_final_message")} | options
        clock = SimpleNamespace(now=lambda: NOW)
        with patch("transformers.utils.chat_template_utils.datetime", clock):
            try:
                text = self._tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False, **options)
            except Exception:
                return REFUSED
        return comparable(text)


class Ours:
    """A template in a checkpoint's folder."""

    def __init__(self, folder: Path, source: str):
        (folder / "tokenizer_config.json").write_text(json.dumps(TOKENS))
        (folder / "chat_template.jinja").write_text(source, encoding="utf-8", newline="")
        self.refused: str | None = None
        try:
            self._template: ChatTemplate | None = ChatTemplate(folder, clock=lambda: NOW)
        except ModelError as error:
            self._template, self.refused = None, str(error)

    def says(self, messages: list[dict[str, Any]], **options: Any) -> str | None:
        variables = {name: options[name] for name in options if name == "enable_thinking"}
        options = {name: value for name, value in options.items() if name not in variables}
        try:
            assert self._template is not None
            return comparable(self._template.render(messages, variables=variables, **options))
        except (AssertionError, TemplateError):
            return REFUSED


def comparable(text: str) -> str:
    """Without the places in memory that Python writes for things that have no text, and without transformers' mark in a
    message that is shown twice."""
    return re.sub(r"CONTINUE_FINAL_MESSAGE_TAG ?", "", re.sub(r"0x[0-9a-f]+", "0x", text))


def differences(oracle: Oracle, folder: Path, source: str) -> dict[str, tuple[str | None, str | None]]:
    """Chats that transformers and we render otherwise: what each says."""
    ours = Ours(folder, source)
    said = {name: (oracle.says(source, chat, **options), ours.says(chat, **options))
            for name, (chat, options) in CHATS.items()}  # fmt: skip
    return {name: pair for name, pair in said.items() if pair[0] != pair[1]}
