"""What kind of text a prompt is made of, by its characters: code, JSON, digits, or prose of a script."""

import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator

PIECE_CHARACTERS = 800  # long enough to tell a kind, short enough for prompts of several kinds
# The first code point of each range of the Unicode blocks that scripts have; "" is of none.
_RANGES = (
    (0x0000, ""), (0x0041, "Latin"), (0x005B, ""), (0x0061, "Latin"), (0x007B, ""), (0x00C0, "Latin"), (0x0250, ""),
    (0x0370, "Greek"), (0x0400, "Cyrillic"), (0x0530, "Armenian"), (0x0590, "Hebrew"), (0x0600, "Arabic"),
    (0x0780, ""), (0x0900, "Devanagari"), (0x0980, "Bengali"), (0x0A00, "Indic"), (0x0E00, "Thai"), (0x0E80, "Lao"),
    (0x0F00, ""), (0x10A0, "Georgian"), (0x1100, "Hangul"), (0x1200, "Ethiopic"), (0x1380, ""), (0x1E00, "Latin"),
    (0x1F00, "Greek"), (0x2000, ""), (0x3040, "Kana"), (0x3100, "CJK"), (0x3130, "Hangul"), (0x3190, "CJK"),
    (0xA000, ""), (0xAC00, "Hangul"), (0xD7B0, ""), (0xF900, "CJK"), (0xFB00, ""), (0x20000, "CJK"), (0x30000, ""),
)  # fmt: skip
_STARTS = [start for start, _ in _RANGES]
_CODE_LINE = re.compile(
    r"^\s*(def |class |return\b|import |from \w+ import|if .*:$|for .*:$|while .*:$|else:|try:|#include|const )"
    r"|^\s*(function\b|let |var |public |private |fn |func |package |use |SELECT |INSERT |UPDATE |@\w+|//|/\*|\})"
    r"|[;{}]\s*$|\w\(.*\)[;:]?$"
)
_DIGITS_FROM, _CODE_FROM, _JSON_FROM = 0.4, 0.4, 0.12  # shares of characters, of lines, of characters


def kind_of(text: str) -> str:
    """`JSON`, `code`, `digits`, or `prose, <script>`; `other` without letters."""
    visible = [character for character in text if not character.isspace()]
    if not visible:
        return "other"
    if _is_json(text, visible):
        return "JSON"
    if sum(map(str.isdigit, visible)) >= _DIGITS_FROM * len(visible):
        return "digits"
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and sum(bool(_CODE_LINE.search(line)) for line in lines) >= _CODE_FROM * len(lines):
        return "code"
    script = script_of(text)
    return f"prose, {script}" if script else "other"


def script_of(text: str) -> str:
    """The script of most letters, "" without letters. Japanese is Kana where it has any, as Chinese has none."""
    counts = Counter(_RANGES[bisect_right(_STARTS, ord(character)) - 1][1] for character in text)
    del counts[""]
    if counts["Kana"] and counts["Kana"] + counts["CJK"] > counts.total() / 2:
        return "Kana"
    return max(counts, key=lambda script: counts[script]) if counts.total() else ""


def pieces(text: str) -> Iterator[str]:
    """The text in parts of one kind, as far as blank lines part them, none much longer than PIECE_CHARACTERS."""
    for paragraph in re.split(r"\n\s*\n", text):
        for start in range(0, len(paragraph), PIECE_CHARACTERS):
            if paragraph[start : start + PIECE_CHARACTERS].strip():
                yield paragraph[start : start + PIECE_CHARACTERS]


def _is_json(text: str, visible: list[str]) -> bool:
    stripped = text.strip()
    if stripped[:1] in "{[" and len(stripped) > 2:
        try:
            json.loads(stripped)
        except ValueError:
            pass
        else:
            return True
    marks = sum(character in '{}[]":,' for character in visible)
    return marks >= _JSON_FROM * len(visible) and stripped.count('"') >= 4 and '":' in stripped
