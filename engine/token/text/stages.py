"""The steps of a decoder, one item at a time: each returns the items that can no longer change.

`finish` returns what an end here would add, and changes nothing. An item costs the same however many came before it.
"""

import codecs
import re
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from functools import lru_cache
from typing import Protocol

REPLACEMENT = "\ufffd"
_HEX_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")  # the library's parser takes a sign, too
CLEANUP = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"),
    (" do not", " don't"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip


class Stage(Protocol):
    """A step of a decoder, with the state of one text. `later` is what any next item will add before itself."""

    @property
    def later(self) -> str: ...
    def push(self, item: str) -> Iterable[str]: ...
    def finish(self) -> Iterable[str]: ...


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


class Mapped:
    """Each item by itself."""

    later = ""

    def __init__(self, step: Callable[[str], str]):
        self._step = step

    def push(self, item: str) -> Iterable[str]:
        return (self._step(item),)

    def finish(self) -> Iterable[str]:
        return ()


class Joined(Mapped):
    """No decoder: a blank between two entries."""

    def __init__(self) -> None:
        self._blank = ""

    def push(self, item: str) -> Iterable[str]:
        blank, self._blank = self._blank, " "
        return (blank + item,)


class First(Mapped):
    """One text is replaced, in the first item by another one than in those behind it."""

    def __init__(self, old: str, first: str, later: str, *, never: bool):
        self._old, self._new, self._later = old, later if never else first, later

    def push(self, item: str) -> Iterable[str]:
        new, self._new = self._new, self._later
        return (item.replace(self._old, new),)


class WordPiece(Mapped):
    def __init__(self, prefix: str, cleanup: bool):
        self._prefix, self._cleanup, self._is_first = prefix, cleanup, True

    def push(self, item: str) -> Iterable[str]:
        if not self._is_first:
            item = item[len(self._prefix) :] if item.startswith(self._prefix) else " " + item
        self._is_first = False
        return (cleaned(item) if self._cleanup else item,)


class CTC(Mapped):
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
            item = cleaned(item).replace(self._delimiter, " ")
        return (item,) if item else ()


class BPESuffix:
    """The end of a word is a blank, but not at the end of the text."""

    def __init__(self, suffix: str):
        self._suffix, self._held = suffix, ""

    @property
    def later(self) -> str:
        return self._held.replace("\0", " ")

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


class ByteLevel(Mapped):
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


class ByteFallback(Mapped):
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


class StrippedStart(Mapped):
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


class Replaced(Mapped):
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


class Held(Mapped):
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


def cleaned(text: str) -> str:
    for old, new in CLEANUP:
        text = text.replace(old, new)
    return text
