"""Traces with hashes of their prompts' blocks: Mooncake's (blocks of 512 tokens) and Qwen-Bailian's (of 16).

Qin et al., "Mooncake", FAST 2025; Wang et al., "KVCache Cache in the Wild", ATC 2025.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from loadgen.traces.row import Head, Tally, TraceForm, TraceRow, Window, bad_line, json_lines

MOONCAKE_BLOCK, BAILIAN_BLOCK = 512, 16
MS_PER_S = 1000.0

Tokens = Annotated[int, Meta(ge=0, le=10_000_000)]
Ids = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class MooncakeLine(Struct):
    timestamp: Annotated[float, Meta(ge=0)]  # in ms, of Bailian in s
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[Ids] = []


class BailianLine(MooncakeLine, kw_only=True):
    chat_id: int
    parent_chat_id: int


def _is_mooncake(head: Head) -> bool:
    line = head.first_object or {}
    return {"timestamp", "input_length", "output_length"} <= line.keys() and "chat_id" not in line


def _is_bailian(head: Head) -> bool:
    return {"timestamp", "input_length", "chat_id", "parent_chat_id"} <= (head.first_object or {}).keys()


def _mooncake_rows(path: Path, window: Window, _tally: Tally) -> Iterator[TraceRow]:
    for number, line in json_lines(path, MooncakeLine):
        ids = _checked_ids(path, number, line, MOONCAKE_BLOCK)
        yield TraceRow(line.timestamp / MS_PER_S, line.input_length, line.output_length, ids, MOONCAKE_BLOCK)


def _bailian_rows(path: Path, window: Window, _tally: Tally) -> Iterator[TraceRow]:
    """A session is a tree of chats, named by its root, if the file has the root before its children."""
    root_of: dict[int, int] = {}
    for number, line in json_lines(path, BailianLine):
        root = root_of[line.chat_id] = root_of.get(line.parent_chat_id, line.parent_chat_id) if (
            line.parent_chat_id >= 0
        ) else line.chat_id  # fmt: skip
        ids = _checked_ids(path, number, line, BAILIAN_BLOCK)
        yield TraceRow(line.timestamp, line.input_length, line.output_length, ids, BAILIAN_BLOCK, session_id=str(root))


def _checked_ids(path: Path, number: int, line: MooncakeLine, block: int) -> tuple[int, ...]:
    """Checks the ids: one for every block, with or without the last and partial one; or none at all."""
    num_ids, num_full = len(line.hash_ids), line.input_length // block
    if num_ids and not num_full <= num_ids <= -(-line.input_length // block):
        raise bad_line(path, number, f"hash_ids has {num_ids} entries, but input_length {line.input_length} is "
                       f"{-(-line.input_length // block)} blocks of {block} tokens")  # fmt: skip
    return tuple(line.hash_ids)


MOONCAKE = TraceForm("mooncake", "JSONL with timestamp (ms), input_length, output_length, hash_ids of 512-token "
                     "blocks (Mooncake)", _is_mooncake, _mooncake_rows, MOONCAKE_BLOCK)  # fmt: skip
BAILIAN = TraceForm("bailian", "JSONL with chat_id, parent_chat_id, timestamp (s), input_length, output_length, turn, "
                    "hash_ids of 16-token blocks (Qwen-Bailian)", _is_bailian, _bailian_rows,
                    BAILIAN_BLOCK)  # fmt: skip
