"""Traces with hashes of their prompts' blocks: Mooncake's (blocks of 512 tokens) and Qwen-Bailian's (of 16).

Many tools write Mooncake's columns, with times in another unit and blocks of another size: both are told by the file.

Qin et al., "Mooncake", FAST 2025; Wang et al., "KVCache Cache in the Wild", ATC 2025.
"""

from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from sojourn.loadgen.errors import ScenarioError
from sojourn.loadgen.traces.clock import UNITS, UnknownUnit, refuse_another_unit, seconds_of, unit_of
from sojourn.loadgen.traces.row import Head, Tally, TraceForm, TraceRow, Window, bad_line, json_lines

MOONCAKE_BLOCK, BAILIAN_BLOCK = 512, 16
BLOCK_SIZES = (MOONCAKE_BLOCK, 16, 32, 64, 128, 256, 1024, 2048, 4096, 8, 4, 1)  # the first that fits is taken
LOOKED_AT = 10_000  # lines that decide the unit of the times and the size of a block

Tokens = Annotated[int, Meta(ge=0, le=10_000_000)]
Ids = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class MooncakeLine(Struct):
    timestamp: float | str  # a number in some unit, or an ISO time; of Bailian seconds
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[Ids] = []


class BailianLine(MooncakeLine, kw_only=True):
    timestamp: Annotated[float, Meta(ge=0)]
    chat_id: int
    parent_chat_id: int


def _is_mooncake(head: Head) -> bool:
    line = head.first_object or {}
    return {"timestamp", "input_length", "output_length"} <= line.keys() and "chat_id" not in line


def _is_bailian(head: Head) -> bool:
    return {"timestamp", "input_length", "chat_id", "parent_chat_id"} <= (head.first_object or {}).keys()


def _mooncake_rows(path: Path, window: Window, _tally: Tally) -> Iterator[TraceRow]:
    unit, size = clock_and_blocks(path, window)
    kinds = set()
    for number, line in json_lines(path, MooncakeLine):
        kinds.add(isinstance(line.timestamp, str))
        if len(kinds) > 1:
            raise bad_line(path, number, f"timestamp is {line.timestamp!r}, of another kind than before; write all as "
                           "numbers, or all as ISO times")  # fmt: skip
        ids = _checked_ids(path, number, line, size)
        yield TraceRow(_time(path, number, line) * unit, line.input_length, line.output_length, ids, size)


def clock_and_blocks(path: Path, window: Window) -> tuple[float, int]:
    """Seconds of one unit of the file's timestamps, and the tokens of one of its blocks. Raises ScenarioError where the
    file does not imply a unit."""
    stamps, hashed, is_iso = array("d"), set(), False  # of a line no more is kept: its ids take the memory
    for number, line in islice(json_lines(path, MooncakeLine), LOOKED_AT):
        stamps.append(_time(path, number, line))
        is_iso |= isinstance(line.timestamp, str)
        if line.hash_ids:
            hashed.add((line.input_length, len(line.hash_ids)))
    unit = window.seconds_per_unit or (1.0 if is_iso or not stamps else _implied(path, stamps, bool(hashed)))
    fits = (size for size in BLOCK_SIZES if all(_fits(length, ids, size) for length, ids in hashed))
    return unit, window.hash_tokens or next(fits, MOONCAKE_BLOCK)


def _implied(path: Path, stamps: Sequence[float], has_hashes: bool) -> float:
    refuse_another_unit(path.name, stamps)
    try:
        return UNITS[unit_of(stamps, has_hashes)]
    except UnknownUnit as unknown:
        raise ScenarioError(
            f"{path.name}: {unknown}. Say which: arrivals.seconds_per_unit, or --timed-trace-sec-multiplier of "
            "bench-serve (1: seconds, 0.001: milliseconds)"
        ) from None


def _time(path: Path, number: int, line: MooncakeLine) -> float:
    try:
        stamp = seconds_of(line.timestamp)
    except ValueError:
        raise bad_line(path, number, f"timestamp is {line.timestamp!r}; it must be a number or an ISO time") from None
    if not 0 <= stamp < float("inf"):
        raise bad_line(path, number, f"timestamp is {stamp:g}; it must be at least 0")
    return stamp


def _fits(length: int, num_ids: int, size: int) -> bool:
    """Whether there is an id for every block, with or without the last and partial one."""
    return length // size <= num_ids <= -(-length // size)


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
    num_ids = len(line.hash_ids)
    if num_ids and not _fits(line.input_length, num_ids, block):
        raise bad_line(path, number, f"hash_ids has {num_ids} entries, but input_length {line.input_length} is "
                       f"{-(-line.input_length // block)} blocks of {block} tokens")  # fmt: skip
    return tuple(line.hash_ids)


MOONCAKE = TraceForm("mooncake", "JSONL with timestamp, input_length, output_length, hash_ids (Mooncake: ms, blocks "
                     "of 512 tokens)", _is_mooncake, _mooncake_rows, MOONCAKE_BLOCK, has_unit=True)  # fmt: skip
BAILIAN = TraceForm("bailian", "JSONL with chat_id, parent_chat_id, timestamp (s), input_length, output_length, turn, "
                    "hash_ids of 16-token blocks (Qwen-Bailian)", _is_bailian, _bailian_rows,
                    BAILIAN_BLOCK)  # fmt: skip
