"""The decoders of a tokenizer.json, one entry at a time: what they give is what `tokenizers` gives for all at once.

A decoder is a chain of stages. Each stage takes one item and returns those that can no longer change; `finish` returns
what an end here would add. An item costs the same however many came before it.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from functools import lru_cache
from typing import Any, Protocol

from tokenizers import Tokenizer as HuggingFaceTokenizer

REPLACEMENT = "\ufffd"
_HEX_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")  # the library's parser takes a sign, too
_CLEANUP = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"),
    (" do not", " don't"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip


class Stage(Protocol):
    """A step of a decoder, with the state of one text."""

    def push(self, item: str) -> Iterable[str]: ...
    def finish(self) -> Iterable[str]: ...


class Decoder:
    """Makes the stages of a text. `section` is the decoder of a tokenizer.json; None joins entries with blanks."""

    def __init__(self, section: dict[str, Any] | None):
        steps = _flat(section)
        maps: list[Callable[[str], str]] = []  # of single entries, before any stage
        while steps and (step := _map_of(steps[0])) is not None:
            maps.append(step)
            steps = steps[1:]
        self._stages, self._is_exact = _stages_of(steps) if section is not None else ([_Joined()], True)
        self._maps = maps
        kinds = {type(stage) for stage in self._stages}
        self.is_byte_level = _ByteLevel in kinds
        self.is_byte_fallback = ByteFallback in kinds
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
        entry = self.map(entry)
        if self.is_byte_level:
            return bytes_of(entry)
        if self.is_byte_fallback and (byte := byte_of(entry)) is not None:
            return bytes([byte])
        if not self._is_exact:
            return entry.encode()
        stages = self.stages()
        through(stages, "a")
        return (through(stages, entry) or finished(stages)).encode()

    def _mapped(self, entry: str) -> str:
        for step in self._maps:
            entry = step(entry)
        return entry


def through(stages: Sequence[Stage], item: str) -> str:
    """The text that an item makes certain."""
    items: Iterable[str] = (item,)
    for stage in stages:
        items = [out for each in items for out in stage.push(each)]
    return "".join(items)


def finished(stages: Sequence[Stage]) -> str:
    """The text that an end here would add. The stages are as before."""
    items: list[str] = []
    for stage in deepcopy(list(stages)):
        items = [out for each in items for out in stage.push(each)] + list(stage.finish())
    return "".join(items)


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
            is_exact = is_exact and not any(isinstance(stage, _Replaced) for stage in made or ())
        else:
            begins += 1
            made = _of_items(step, is_last=all(after["type"] == "Fuse" for after in rest))
            is_exact = is_exact and begins == 1
            is_joined = kind == "ByteLevel"
        if made is None:
            return [*stages, _Held(_library(steps[position:]), is_joined)], False
        stages += made
    return stages, is_exact


def _of_items(step: dict[str, Any], *, is_last: bool) -> list[Stage] | None:
    """Before the entries are joined. None for what can only be known at the end."""
    kind = step["type"]
    if kind == "ByteFallback":
        return [ByteFallback()]
    if kind == "ByteLevel":
        return [_ByteLevel()]
    if kind == "Metaspace":
        never = step.get("prepend_scheme") == "never"
        return [_First(step["replacement"], "", " ", never=never)]
    if kind == "WordPiece":
        return [_WordPiece(step["prefix"], step["cleanup"])]
    if kind == "CTC":
        return [_CTC(step["pad_token"], step["word_delimiter_token"], step["cleanup"])]
    if kind == "BPEDecoder" and is_last and step["suffix"]:
        return [_BPESuffix(step["suffix"])]
    if (step_map := _map_of(step)) is not None:
        return [_Mapped(step_map)]
    return None


def _of_text(step: dict[str, Any]) -> list[Stage] | None:
    """Behind the join, where the text is one item. None for what can only be known at the end."""
    kind = step["type"]
    if kind == "Strip" and not step["stop"]:
        return [_StrippedStart(step["content"], step["start"])]
    if kind == "Replace" and step["pattern"].get("String"):
        return [_replaced(step["pattern"]["String"], step["content"])]
    if kind == "WordPiece":
        return [_replaced(old, new) for old, new in _CLEANUP] if step["cleanup"] else []
    if kind == "Metaspace":
        return [_replaced(step["replacement"], " " if step.get("prepend_scheme") == "never" else "")]
    if kind == "BPEDecoder" and step["suffix"]:
        return [_replaced(step["suffix"], "")]
    return None


def _replace_of(step: dict[str, Any]) -> Callable[[str], str] | None:
    old, new = step["pattern"].get("String"), step["content"]
    return (lambda entry: entry.replace(old, new)) if old else None


def _replaced(old: str, new: str) -> Stage:
    return _Mapped(lambda text: text.replace(old, new)) if len(old) == 1 else _Replaced(old, new)


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


@lru_cache(1 << 10)
def byte_of(entry: str) -> int | None:
    """The byte that an entry such as <0x0A> stands for."""
    found = _HEX_BYTE.fullmatch(entry)
    return int(found[1], 16) if found else None


@lru_cache(1 << 17)
def bytes_of(entry: str) -> bytes:
    """The bytes of an entry in the byte-level alphabet; those of its text where it holds another character."""
    try:
        return bytes([_BYTE_OF[character] for character in entry])
    except KeyError:
        return entry.encode()


def _byte_alphabet() -> dict[str, int]:
    """Character → byte, as GPT-2's byte-level tokenizers spell bytes that do not print (Radford et al., 2019)."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    alphabet = {chr(byte): byte for byte in printing}
    return alphabet | {chr(256 + position): byte for position, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


class _Mapped:
    """Each item by itself."""

    def __init__(self, step: Callable[[str], str]):
        self._step = step

    def push(self, item: str) -> Iterable[str]:
        return (self._step(item),)

    def finish(self) -> Iterable[str]:
        return ()


class _Joined(_Mapped):
    """No decoder: a blank between two entries."""

    def __init__(self) -> None:
        self._blank = ""

    def push(self, item: str) -> Iterable[str]:
        blank, self._blank = self._blank, " "
        return (blank + item,)


class _First(_Mapped):
    """One text is replaced, in the first item by another one than in those behind it."""

    def __init__(self, old: str, first: str, later: str, *, never: bool):
        self._old, self._new, self._later = old, later if never else first, later

    def push(self, item: str) -> Iterable[str]:
        new, self._new = self._new, self._later
        return (item.replace(self._old, new),)


class _WordPiece(_Mapped):
    def __init__(self, prefix: str, cleanup: bool):
        self._prefix, self._cleanup, self._is_first = prefix, cleanup, True

    def push(self, item: str) -> Iterable[str]:
        if not self._is_first:
            item = item[len(self._prefix) :] if item.startswith(self._prefix) else " " + item
        self._is_first = False
        return (_cleaned(item) if self._cleanup else item,)


class _CTC(_Mapped):
    """Equal neighbours are one, and a pad is none (Graves et al., 2006)."""

    def __init__(self, pad: str, delimiter: str, cleanup: bool):
        self._pad, self._delimiter, self._cleanup = pad, delimiter, cleanup
        self._last: str | None = None

    def push(self, item: str) -> Iterable[str]:
        last, self._last = self._last, item
        if item == last:
            return ()
        item = item.replace(self._pad, "")
        if self._cleanup:
            item = _cleaned(item).replace(self._delimiter, " ")
        return (item,) if item else ()


class _BPESuffix:
    """The end of a word is a blank, but not at the end of the text."""

    def __init__(self, suffix: str):
        self._suffix, self._held = suffix, ""

    def push(self, item: str) -> Iterable[str]:
        held, self._held = self._held, ""
        parts = item.split(self._suffix)
        # Suffixes inside an entry are blanks, too, once another entry follows.
        if len(parts) == 2 and not parts[1]:
            self._held = " "
            return (held + parts[0],)
        if len(parts) > 1:
            self._held = "\0".join(parts)
            return (held.replace("\0", " "),)
        return (held.replace("\0", " ") + item,)

    def finish(self) -> Iterable[str]:
        return ("" if self._held == " " else self._held.replace("\0", ""),)


class _ByteLevel:
    """Bytes wait to be a character."""

    def __init__(self) -> None:
        self._bytes = b""

    def push(self, item: str) -> Iterable[str]:
        data = self._bytes + bytes_of(item)
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._bytes = data[used:]
        return (text,) if text else ()

    def finish(self) -> Iterable[str]:
        return (self._bytes.decode("utf-8", "replace"),) if self._bytes else ()


class ByteFallback:
    """Bytes wait for the end of their run: if the run is not UTF-8 as a whole, each byte of it is U+FFFD."""

    def __init__(self) -> None:
        self.num_open = 0  # bytes of a run that is UTF-8 so far
        self.ahead = ""  # the character that the last push completed, but did not make certain
        self._parts: list[str] = []  # a character each
        self._bytes = b""  # the beginning of a character
        self.is_broken = False  # the run is no UTF-8

    def push(self, item: str) -> Iterable[str]:
        byte = byte_of(item)
        self.ahead = ""
        if byte is None:
            if not self.num_open and not self.is_broken:
                return (item,)
            done = (*self.finish(), item)
            self._close(broken=False)
            return done
        if self.is_broken:
            return (REPLACEMENT,)
        self.num_open += 1
        data = self._bytes + bytes([byte])
        try:
            self.ahead, used = codecs.utf_8_decode(data, "strict", False)
        except UnicodeDecodeError:
            done = (REPLACEMENT,) * self.num_open
            self._close(broken=True)
            return done
        self._bytes = data[used:]
        if self.ahead:
            self._parts.append(self.ahead)
        return ()

    def finish(self) -> Iterable[str]:
        if self._bytes:
            return (REPLACEMENT,) * self.num_open
        return ("".join(self._parts),) if self._parts else ()

    @property
    def num_characters(self) -> int:
        """Of the run so far."""
        return len(self._parts)

    def _close(self, *, broken: bool) -> None:
        self.num_open, self._parts, self._bytes, self.is_broken = 0, [], b"", broken


class _StrippedStart(_Mapped):
    """The first characters of the text go, if they are `content`."""

    def __init__(self, content: str, number: int):
        self._content, self._left = content, number

    def push(self, item: str) -> Iterable[str]:
        while self._left and item:
            if item[0] != self._content:
                self._left = 0
                break
            item, self._left = item[1:], self._left - 1
        return (item,) if item else ()


class _Replaced:
    """A text of several characters, wherever it stands: its beginning waits for the rest of it."""

    def __init__(self, old: str, new: str):
        self._old, self._new, self._rest = old, new, ""

    def push(self, item: str) -> Iterable[str]:
        text = self._rest + item
        done = text.split(self._old)
        end = done.pop()
        overlap = next(n for n in range(min(len(end), len(self._old) - 1), -1, -1) if end.endswith(self._old[:n]))
        self._rest = end[len(end) - overlap :]
        return (self._new.join([*done, end[: len(end) - overlap]]),)

    def finish(self) -> Iterable[str]:
        return (self._rest,) if self._rest else ()


class _Held:
    """What can only be known at the end of the text, as a regular expression over all of it."""

    def __init__(self, decode: Callable[..., str], is_joined: bool):
        self._decode, self._is_joined = decode, is_joined
        self._items: list[str] = []

    def push(self, item: str) -> Iterable[str]:
        self._items.append(item)
        return ()

    def finish(self) -> Iterable[str]:
        items = ["".join(self._items)] if self._is_joined else self._items
        return (self._decode(*items),) if items else ()


def _cleaned(text: str) -> str:
    for old, new in _CLEANUP:
        text = text.replace(old, new)
    return text
