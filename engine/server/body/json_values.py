"""How much work the JSON of a body is, before it is decoded: a decoder cannot be interrupted."""

import re

# Of one body. A number or a text counts 1, a list or an object 4, and a field 4 more, for the time that they take:
# 20 ms in all at worst.
MAX_VALUES = 400_000
SLICE_BYTES = 262_144  # looked at in one go, which other threads wait for: 2 ms at worst

_TEXT = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)  # of a string, up to its quote


def has_too_many_values(content: bytes) -> bool:
    """Whether JSON has more than MAX_VALUES values. What stands in strings is free."""
    if 4 * len(content) <= MAX_VALUES or _values(content, 0, len(content)) <= MAX_VALUES:
        return False
    found, begin = 0, 0
    while 0 <= begin < len(content) and found <= MAX_VALUES:
        quote = content.find(b'"', begin)
        found += _values(content, begin, len(content) if quote < 0 else quote)
        begin = _end_of_string(content, quote + 1) if quote >= 0 else -1
    return found > MAX_VALUES


def _values(content: bytes, begin: int, end: int) -> int:
    """Between two positions, by what separates them."""
    found = 0
    for first in range(begin, end, SLICE_BYTES):
        last = min(first + SLICE_BYTES, end)
        found += content.count(b",", first, last) + 4 * content.count(b":", first, last)
        found += 3 * (content.count(b"[", first, last) + content.count(b"{", first, last))
    return found


def _end_of_string(content: bytes, begin: int) -> int:
    """Behind the closing quote of a string that begins here; -1 for one that does not end."""
    while begin < len(content):
        last = min(begin + SLICE_BYTES, len(content))
        end = _TEXT.match(content, begin, last).end()
        if end < last and content[end] == ord('"'):
            return end + 1
        if end == begin:  # a backslash is the last byte
            break
        begin = end
    return -1
