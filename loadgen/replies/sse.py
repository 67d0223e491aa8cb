"""Server-sent events: bytes, however they were cut, → the data of each event. After the WHATWG HTML standard, 9.2."""

import re

_LINE_END = re.compile(rb"\r\n|\n|\r")


class SseDecoder:
    """Holds what has been read of an event that is not complete yet. Fields other than `data` mean nothing to us."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._after_carriage_return = False

    def feed(self, chunk: bytes) -> list[str]:
        """The data of each event that this chunk completes, in order.

        An event is given out at its blank line, even if a line feed may still belong to it: it is dropped then.
        """
        if self._after_carriage_return and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._after_carriage_return = False
        content = self._rest + chunk
        events, position = [], 0
        for end in _LINE_END.finditer(content):
            line = content[position : end.start()]
            position = end.end()
            if line:
                self._field(line)
            elif self._data:
                events.append(b"\n".join(self._data).decode("utf-8", "replace"))
                self._data = []
        self._rest = content[position:]
        self._after_carriage_return = position == len(content) and content.endswith(b"\r")
        return events

    def _field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
