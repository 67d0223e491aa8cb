"""The requests of a session. Each is joined from prebuilt parts once the answer before it has arrived."""

from dataclasses import dataclass

# What stands around an answer in the history: a message of its own, or nothing in a text that goes on.
_AROUND_ANSWER = {"chat": (b',{"role":"assistant","content":"', b'"},'), "completions": (b"", b"")}


@dataclass(frozen=True, slots=True)
class TurnParts:
    """One request of a session in parts. Its bytes are `head`, the length of the body, `headers`, and the body:
    `before`, the conversation so far, `message`, `after`."""

    api: str
    head: bytes
    headers: bytes
    before: bytes
    message: bytes  # JSON: the messages that this turn adds, or the inside of a text
    after: bytes


@dataclass(frozen=True, slots=True)
class PiecedBody:
    """One request whose prompt is joined from pieces that other requests of its session share."""

    head: bytes
    headers: bytes
    before: bytes
    pieces: list[bytes]
    after: bytes

    def wire(self) -> bytes:
        prompt = b" ".join(self.pieces)
        length = len(self.before) + len(prompt) + len(self.after)
        return b"".join((self.head, b"%d" % length, self.headers, self.before, prompt, self.after))


Wire = bytes | TurnParts | PiecedBody  # what becomes the bytes of one request


class Conversation:
    """Owns the history of one session."""

    def __init__(self) -> None:
        self._history = b""

    def next_wire(self, turn: TurnParts, answer: bytes = b"") -> bytes:
        """The bytes of the next request. `answer` is the JSON-escaped text of the reply to the one before."""
        if self._history:
            opening, closing = _AROUND_ANSWER[turn.api]
            self._history = b"".join((self._history, opening, answer, closing, turn.message))
        else:
            self._history = turn.message
        length = len(turn.before) + len(self._history) + len(turn.after)
        return b"".join((turn.head, b"%d" % length, turn.headers, turn.before, self._history, turn.after))
