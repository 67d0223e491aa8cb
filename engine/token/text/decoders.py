"""The decoders of a tokenizer.json, one entry at a time: what they give is what `tokenizers` gives for all at once.

A decoder is a chain of stages. Each stage takes one item and returns those that can no longer change; `finish` returns
what an end here would add. An item costs the same however many came before it.
"""

import json
from collections.abc import Callable
from copy import deepcopy
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer as HuggingFaceTokenizer

from sojourn.engine.token.text.stages import (
    CLEANUP,
    CTC,
    BPESuffix,
    ByteFallback,
    ByteLevel,
    First,
    Held,
    Joined,
    Mapped,
    Replaced,
    Stage,
    StrippedStart,
    WordPiece,
    byte_of,
    bytes_of,
    through,
)  # fmt: skip


class Decoder:
    """Makes the stages of a text. `section` is the decoder of a tokenizer.json; None joins entries with blanks."""

    def __init__(self, section: dict[str, Any] | None):
        steps = _flat(section)
        maps: list[Callable[[str], str]] = []  # of single entries, before any stage
        while steps and (step := _map_of(steps[0])) is not None:
            maps.append(step)
            steps = steps[1:]
        self._stages, self._is_exact = _stages_of(steps) if section is not None else ([Joined()], True)
        self._maps = maps
        kinds = {type(stage) for stage in self._stages}
        self.is_byte_level = ByteLevel in kinds
        self.is_byte_fallback = ByteFallback in kinds
        self._is_plain = kinds <= {ByteFallback, StrippedStart}  # the items are the text
        self.map: Callable[[str], str] = lru_cache(1 << 17)(self._mapped) if maps else str

    def stages(self) -> list[Stage]:
        return deepcopy(self._stages)

    def is_anchor(self, item: str) -> bool:
        """Whether the items before this one have no say in what follows it, but for the very first of them."""
        if not self._is_exact:
            return False
        if self.is_byte_level:
            return any(byte & 0xC0 != 0x80 for byte in bytes_of(item))
        return not self.is_byte_fallback or byte_of(item) is None

    def spelled(self, entry: str) -> bytes:
        """What an entry in the middle of a text adds to it."""
        item = self.map(entry)
        if self.is_byte_level:
            return bytes_of(item)
        if self.is_byte_fallback and (byte := byte_of(item)) is not None:
            return bytes([byte])
        if self._is_plain or not self._is_exact:
            return item.encode()
        stages = self.stages()
        through(stages, "a")
        return (through(stages, item) + "".join(stage.later for stage in stages)).encode()

    def _mapped(self, entry: str) -> str:
        for step in self._maps:
            entry = step(entry)
        return entry


def _flat(section: dict[str, Any] | None) -> list[dict[str, Any]]:
    if section is None:
        return []
    if section["type"] == "Sequence":
        return [step for inner in section["decoders"] for step in _flat(inner)]
    return [section]


def _map_of(step: dict[str, Any]) -> Callable[[str], str] | None:
    """A step that looks at one entry only."""
    if step["type"] == "Replace":
        return _replace_of(step) or _library([step])
    if step["type"] == "Strip":
        return lambda entry: _stripped(entry, step["content"], step["start"], step["stop"])
    if step["type"] == "Metaspace" and step.get("prepend_scheme") == "never":
        return lambda entry: entry.replace(step["replacement"], " ")
    return None


def _stages_of(steps: list[dict[str, Any]]) -> tuple[list[Stage], bool]:
    """The stages of the steps, and whether the last entry alone is their state (else the whole prompt is)."""
    stages: list[Stage] = []
    is_joined, is_exact, begins = False, True, 0
    for position, step in enumerate(steps):
        kind, rest = step["type"], steps[position + 1 :]
        if kind == "Fuse":
            is_joined = True
            continue
        if is_joined:
            made = _of_text(step)
            is_exact = is_exact and not any(isinstance(stage, Replaced) for stage in made or ())
        else:
            begins += 1
            made = _of_items(step, is_last=all(after["type"] == "Fuse" for after in rest))
            is_exact = is_exact and begins == 1
            is_joined = kind == "ByteLevel"
        if made is None:
            return [*stages, Held(_library(steps[position:]), is_joined)], False
        stages += made
    return stages, is_exact


def _of_items(step: dict[str, Any], *, is_last: bool) -> list[Stage] | None:
    """Before the entries are joined. None for what can only be known at the end."""
    kind = step["type"]
    if kind == "ByteFallback":
        return [ByteFallback()]
    if kind == "ByteLevel":
        return [ByteLevel()]
    if kind == "Metaspace":
        never = step.get("prepend_scheme") == "never"
        return [First(step["replacement"], "", " ", never=never)]
    if kind == "WordPiece":
        return [WordPiece(step["prefix"], step["cleanup"])]
    if kind == "CTC":
        return [CTC(step["pad_token"], step["word_delimiter_token"], step["cleanup"])]
    if kind == "BPEDecoder" and is_last and step["suffix"]:
        return [BPESuffix(step["suffix"])]
    if (step_map := _map_of(step)) is not None:
        return [Mapped(step_map)]
    return None


def _of_text(step: dict[str, Any]) -> list[Stage] | None:
    """Behind the join, where the text is one item. None for what can only be known at the end."""
    kind = step["type"]
    if kind == "Strip" and not step["stop"]:
        return [StrippedStart(step["content"], step["start"])]
    if kind == "Replace" and step["pattern"].get("String"):
        return [_replaced(step["pattern"]["String"], step["content"])]
    if kind == "WordPiece":
        return [_replaced(old, new) for old, new in CLEANUP] if step["cleanup"] else []
    if kind == "Metaspace":
        return [_replaced(step["replacement"], " " if step.get("prepend_scheme") == "never" else "")]
    if kind == "BPEDecoder" and step["suffix"]:
        return [_replaced(step["suffix"], "")]
    return None


def _replace_of(step: dict[str, Any]) -> Callable[[str], str] | None:
    old, new = step["pattern"].get("String"), step["content"]
    return (lambda entry: entry.replace(old, new)) if old else None


def _replaced(old: str, new: str) -> Stage:
    return Mapped(lambda text: text.replace(old, new)) if len(old) == 1 else Replaced(old, new)


def _library(steps: list[dict[str, Any]]) -> Callable[..., str]:
    """The decoder of the library itself, of one entry or of several."""
    model = {"type": "WordLevel", "vocab": {}, "unk_token": ""}
    source = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
              "pre_tokenizer": None, "post_processor": None, "model": model,
              "decoder": {"type": "Sequence", "decoders": steps}}  # fmt: skip
    library = HuggingFaceTokenizer.from_str(json.dumps(source)).decoder

    def decode(*items: str) -> str:
        try:
            return library.decode(list(items))
        except BaseException as error:  # a panic of the library is no Exception, and must not end the engine
            if type(error).__name__ != "PanicException":
                raise
            return "".join(items)

    return decode


def _stripped(entry: str, content: str, start: int, stop: int) -> str:
    begin, end = 0, len(entry)
    while begin < min(start, len(entry)) and entry[begin] == content:
        begin += 1
    while end > max(begin, len(entry) - stop) and entry[end - 1] == content:
        end -= 1
    return entry[begin:end]
