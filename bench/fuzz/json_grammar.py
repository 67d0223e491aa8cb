"""JSON bodies out of bytes, by the fields of a request model: near enough to valid that the deep checks are reached."""

import json
from collections.abc import Mapping, Sequence

HOSTILE = (
    "-1", "0", "1", "2", "0.5", "-0.0", "1e308", "1e999", "NaN", "-Infinity", str(2**31), str(2**63), str(-(2**63) - 1),
    "9" * 400, "true", "false", "null", '""', '"x"', r'"\ud800"', r'"\u0000"', '"' + "é🙂" * 50 + '"', "[]", "{}",
    "[[]]", "[null]", "[-1]", "[0, 1]", "[1.5]", '["x", 1]', '{"x": 1}', '{"5": 1}', '{"5": -101}', '{"a": 1, "a": 2}',
    "[" * 40 + "]" * 40, '{"a":' * 40 + "1" + "}" * 40, "undefined", "",
    '[{"role": "user", "content": "x"}]', '[{"role": "tool", "content": "x", "tool_call_id": "a"}]',
    '[{"role": "assistant", "content": null, "tool_calls": [{"id": "a", "type": "function", "function": '
    '{"name": "f", "arguments": "{}"}}]}]',
    '[{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}]',
    '[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]',
    '[{"type": "function", "name": "f", "parameters": {"type": "object"}}]',
    '{"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}',
    '{"type": "json_object"}', '{"regex": "(a+)+$"}', '{"type": "function", "function": {"name": "f"}}', '"required"',
    '[{"type": "message", "role": "user", "content": "x"}]', '[{"type": "function_call_output", "call_id": "a"}]',
)  # fmt: skip
NAMES = ("type", "role", "content", "text", "name", "function", "arguments", "schema", "json", "id", "tool_calls")


class Source:
    """Bytes as a sequence of choices. When they run out, every choice is the first."""

    def __init__(self, data: bytes):
        self._data = data
        self._at = 0

    def byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def choose(self, among: Sequence):
        return among[(self.byte() << 8 | self.byte()) % len(among)]

    def rest(self) -> bytes:
        return self._data[self._at :]


def body(source: Source, needed: Mapping[str, str], fields: Sequence[str]) -> bytes:
    """A JSON object with the `needed` members and up to eight others; each may have any value."""
    members = dict(needed)
    for _ in range(source.byte() % 9):
        members[source.choose(fields)] = value(source, 0)
    return ("{" + ", ".join(f"{json.dumps(name)}: {text}" for name, text in members.items()) + "}").encode()


def value(source: Source, depth: int) -> str:
    kind = source.byte() % 8
    if kind < 5 or depth > 3:
        return source.choose(HOSTILE)
    if kind == 5:
        return "[" + ", ".join(value(source, depth + 1) for _ in range(source.byte() % 5)) + "]"
    if kind == 6:
        members = (f'"{source.choose(NAMES)}": {value(source, depth + 1)}' for _ in range(source.byte() % 5))
        return "{" + ", ".join(members) + "}"
    return json.dumps(bytes(source.byte() for _ in range(source.byte() % 32)).decode("latin-1"))
