"""Recorded text: our own minimal JSONL, and ShareGPT's JSON. Lengths that are not in the file are estimated."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from sojourn.loadgen.errors import ScenarioError
from sojourn.loadgen.traces.row import Head, Tally, TraceForm, TraceRow, Window, bad_line, json_lines

TOKENS_PER_WORD = 1.3  # English, and a vocabulary of 30,000 or more

Tokens = Annotated[int, Meta(ge=1, le=10_000_000)]


class PlainLine(Struct, forbid_unknown_fields=True):
    at_s: Annotated[float, Meta(ge=0)] | None = None
    prompt_tokens: Tokens | None = None
    output_tokens: Tokens | None = None
    prompt: Annotated[str, Meta(min_length=1)] | None = None
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)] | None = None
    klass: str = ""
    session_id: str = ""


class Utterance(Struct):
    value: str
    from_: str = msgspec.field(name="from", default="")


class ShareGptEntry(Struct):
    conversations: list[Utterance] = []


def estimated_tokens(text: str) -> int:
    return max(1, round(len(text.split()) * TOKENS_PER_WORD))


def _is_plain(head: Head) -> bool:
    line = head.first_object
    return line is not None and bool({"prompt_tokens", "prompt", "messages"} & line.keys())


def _plain_rows(path: Path, _window: Window, _tally: Tally) -> Iterator[TraceRow]:
    timed: bool | None = None
    for number, line in json_lines(path, PlainLine):
        if line.prompt is not None and line.messages is not None:
            raise bad_line(path, number, "it has both prompt and messages; keep one of the two")
        content = line.messages if line.prompt is None else line.prompt
        if content is None and line.prompt_tokens is None:
            raise bad_line(path, number, "it has neither prompt_tokens nor prompt nor messages; give one of them")
        timed = line.at_s is not None if timed is None else timed
        if timed is not (line.at_s is not None):
            raise bad_line(path, number, "either every line has at_s, or none")
        yield TraceRow(
            line.at_s,
            line.prompt_tokens or estimated_tokens(_text_of(path, number, content)),
            line.output_tokens, klass=line.klass, session_id=line.session_id,
            content="" if content is None else json.dumps(content, ensure_ascii=False),
        )  # fmt: skip


def _text_of(path: Path, number: int, content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    if not all(isinstance(message.get("content"), str) and message.get("role") for message in content):
        raise bad_line(path, number, "a message has no role or no text as its content; give prompt_tokens, "
                       "as its length cannot be estimated")  # fmt: skip
    return " ".join(message["content"] for message in content)


def _is_sharegpt(head: Head) -> bool:
    return head.first_line.lstrip().startswith("[")


def _sharegpt_rows(path: Path, _window: Window, tally: Tally) -> Iterator[TraceRow]:
    """The first question of each conversation, and the length of its answer."""
    try:
        conversations = msgspec.json.decode(path.read_bytes(), type=list[ShareGptEntry])
    except msgspec.MsgspecError as error:
        raise ScenarioError(f"{path.name} is not a JSON list of conversations: {error}") from None
    for entry in conversations:
        content = entry.conversations
        if len(content) < 2 or content[0].from_ not in ("human", "user") or not content[0].value.strip():
            tally["does not begin with a question and its answer"] += 1
            continue
        yield TraceRow(None, estimated_tokens(content[0].value), estimated_tokens(content[1].value),
                       content=json.dumps(content[0].value, ensure_ascii=False))  # fmt: skip


_KEYS = ", ".join(sorted(PlainLine.__struct_fields__))
PLAIN = TraceForm("plain", f"JSONL with some of {_KEYS} (Sojourn's own)", _is_plain, _plain_rows)
SHAREGPT = TraceForm("sharegpt", 'JSON: [{"conversations": [{"from": "human", "value": "…"}, …]}, …] (ShareGPT)',
                     _is_sharegpt, _sharegpt_rows)  # fmt: skip
