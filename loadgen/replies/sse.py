"""Server-sent events: bytes, however they were cut → events. After the WHATWG HTML standard, 9.2."""

import re
from dataclasses import dataclass

_LINE_END = re.compile(rb"\r\n|\n|\r")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
HEARTBEATS = frozenset({"ping", "keepalive", "keep-alive", "keep_alive", "heartbeat", "pong"})


@dataclass(frozen=True, slots=True)
class Event:
    """One event. `name`: of its field `event`, "" without; `error`: of a field `error`, as llama.cpp wrote until 2025;
    `comment`: the comments before its blank line, where Dynamo writes the message of an error."""

    data: str
    name: str = ""
    error: str = ""
    comment: str = ""

    @property
    def is_heartbeat(self) -> bool:
        """Nothing but a sign of life: no data, a comment as data, `ping` or another such word."""
        if self.is_error:
            return False
        said = self.data.strip()
        return self.name.lower() in HEARTBEATS or not said or said[0] == ":" or said.strip("[]").lower() in HEARTBEATS

    @property
    def is_error(self) -> bool:
        return bool(self.error) or "error" in self.name.lower() or self.name.lower() == "exception"


class SseDecoder:
    """Takes pieces of a body, and gives each event at its blank line. Other fields than those of Event are dropped."""

    def __init__(self) -> None:
        self._rest = b""
        self._fields: dict[bytes, list[bytes]] = {}
        self._after_carriage_return = False
        self._at_start = True

    def feed(self, chunk: bytes) -> list[Event]:
        """The events that this piece completes, in order.

        An event is given out at its blank line, even if a line feed may still belong to it: it is dropped then.
        """
        if self._after_carriage_return and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._after_carriage_return = False
        content = self._rest + chunk
        if self._at_start:
            if BYTE_ORDER_MARK.startswith(content):
                self._rest = content
                return []
            self._at_start, content = False, content.removeprefix(BYTE_ORDER_MARK)
        events, position = [], 0
        for end in _LINE_END.finditer(content):
            line = content[position : end.start()]
            position = end.end()
            if line:
                self._field(line)
            elif self._fields:
                events.append(self._event())
        self._rest = content[position:]
        self._after_carriage_return = position == len(content) and content.endswith(b"\r")
        return [event for event in events if event.data or event.is_error or event.name]

    def end(self) -> list[Event]:
        """The event that a body without its last blank line still holds."""
        line, self._rest = self._rest, b""
        if line:
            self._field(line)
        return [self._event()] if self._fields else []

    def _field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name in (b"data", b"event", b"error", b""):
            self._fields.setdefault(name, []).append(value.removeprefix(b" "))

    def _event(self) -> Event:
        found = {name: b"\n".join(lines).decode("utf-8", "replace") for name, lines in self._fields.items()}
        self._fields = {}
        return Event(*(found.get(name, "") for name in (b"data", b"event", b"error", b"")))
