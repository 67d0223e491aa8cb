"""The form in which word lists compare texts: one spelling for all that a reader takes for the same."""

import re
import unicodedata
from bisect import bisect_right

# White space in a row counts as one blank, and invisible characters count as nothing. A longer row of either ends a
# word, so that the text that a stream must hold back has a bound.
MAX_FILLERS = 8
BREAK = "\0"  # in place of a longer row; in no pattern
_INVISIBLE = "\1"
_FILLERS = re.compile(f"[ {_INVISIBLE}]{{2,}}|{_INVISIBLE}")
_HANGUL = range(0xAC00, 0xD7A4)  # syllables stay whole: a list with one would else match a part of another
_DIACRITICS = (range(0x300, 0x370), range(0x1AB0, 0x1B00), range(0x1DC0, 0x1E00), range(0x20D0, 0x2100))
_VARIATIONS = (range(0xFE00, 0xFE10), range(0xE0100, 0xE01F0))
# Scripts that put no blanks between words: Thai, Lao, Myanmar, Khmer, kana, and the ideographs.
_UNSPACED = (
    range(0xE00, 0xF00), range(0x1000, 0x10A0), range(0x1780, 0x1800), range(0x3040, 0x3100), range(0x3400, 0xA000),
    range(0x20000, 0x33480),
)  # fmt: skip


class Folding(dict[int, str]):
    """Code point → its folded spelling, at least one character; made as the characters come.

    Unicode's NFKD and case folding, character by character: what one character becomes depends on no other.
    """

    def __init__(self, *, ignore_diacritics: bool = False):
        super().__init__()
        self._ignore_diacritics = ignore_diacritics

    def __missing__(self, code: int) -> str:
        self[code] = folded = self._fold(chr(code))
        return folded

    def _fold(self, character: str) -> str:
        if character.isspace():
            return " "
        code = ord(character)
        if unicodedata.category(character) in ("Cc", "Cf") or any(code in block for block in _VARIATIONS):
            return _INVISIBLE
        folded = character
        if code not in _HANGUL:
            folded = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", character).casefold())
        if self._ignore_diacritics:
            folded = "".join(part for part in folded if not any(ord(part) in block for block in _DIACRITICS))
        return folded or _INVISIBLE

    def fold(self, text: str) -> str:
        """The text as lists compare it."""
        folded = text.translate(self)
        if _INVISIBLE in folded or "  " in folded:
            folded = _FILLERS.sub(_filler, folded)
        return folded

    def origins(self, text: str) -> list[int]:
        """For each character of the folded text, the index of the character of `text` that it comes from."""
        begins, size = [], 0  # where each character of the text begins before rows of fillers are replaced
        for character in text:
            begins.append(size)
            size += len(self[ord(character)])
        origins: list[int] = []
        copied = 0
        unfilled = text.translate(self)
        for row in _FILLERS.finditer(unfilled):
            origins += range(copied, row.start())
            origins += [row.start()] * len(_filler(row))
            copied = row.end()
        origins += range(copied, size)
        return [bisect_right(begins, index) - 1 for index in origins]


def _filler(row: re.Match[str]) -> str:
    if len(row[0]) > MAX_FILLERS:
        return BREAK
    return " " if " " in row[0] else ""


def is_spaced_letter(character: str) -> bool:
    """Part of a word, in a script whose words have blanks between them."""
    if not (character.isalnum() or character == "_" or unicodedata.category(character)[0] == "M"):
        return False
    return character.isascii() or not any(ord(character) in script for script in _UNSPACED)
