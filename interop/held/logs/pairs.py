"""Settings as Python writes them into a log: `{'a': 1, 'b': [..]}`, `Namespace(a=1)`, `ServerArgs(a=1, b='c')`."""

import ast
import re
from collections.abc import Iterator

from sojourn.interop.held.held import Setting

OPEN, CLOSE = "([{", ")]}"
PAIR = re.compile(r"""\s*(?:(['"])(?P<quoted>\w+)\1\s*:|(?P<name>\w+)=)(?P<value>.*)""", re.DOTALL)


def settings_in(text: str) -> dict[str, Setting]:
    """The pairs at the outermost level of what a text begins with. A value that is no plain literal is left out, and so
    is the last pair of a text that was cut off."""
    found: dict[str, Setting] = {}
    for part in _parts(text):
        pair = PAIR.fullmatch(part)
        if pair is not None and (value := plain(pair["value"].strip())) is not None:
            found[pair["quoted"] or pair["name"]] = value
    return found


def plain(text: str) -> Setting | None:
    """None for None, and for what is no literal. Lists and dicts stay text."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return text.removeprefix("torch.") if re.fullmatch(r"[A-Za-z_][\w.\-/]*", text) else None
    if value is None:
        return None
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        return value[0]
    return text if isinstance(value, list | dict | tuple) else None


def _parts(text: str) -> Iterator[str]:
    """What stands between the commas of the outermost level, each ended by a comma or by the closing bracket."""
    text = text.strip()
    begins = text[:1] in OPEN and bool(text)
    depth, quote, start = 0, "", 1 if begins else 0
    place = start
    while place < len(text):
        char = text[place]
        if quote:
            if char == "\\":
                place += 1
            elif char == quote:
                quote = ""
        elif char in "'\"":
            quote = char
        elif char in OPEN:
            depth += 1
        elif char in CLOSE:
            if depth == 0:
                yield text[start:place]
                return
            depth -= 1
        elif char == "," and depth == 0:
            yield text[start:place]
            start = place + 1
        place += 1
    if not begins and depth == 0 and not quote:
        yield text[start:]
