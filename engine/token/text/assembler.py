"""The text of one output, assembled token by token, for the server and for offline use."""

from collections.abc import Sequence

from engine.token.text.tokenizer import NoText, TextStream
from engine.token.tools.calls import overlap


class TextAssembler:
    """Ends the text at the first stop string, and holds back what may be the beginning of one.

    Text before the token number `min_tokens` is not searched. A token of `stop_token_ids` that ends the output has no
    text. With `show_stop` whatever ends the output, string or token, is part of it.
    """

    def __init__(
        self,
        stream: TextStream | NoText,
        stops: Sequence[str] = (),
        *,
        show_stop: bool = False,
        stop_token_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
    ):
        self.num_tokens = 0
        self.num_characters = 0  # with those that are held back
        self.stop_string: str | None = None  # the one that ended the text
        self._stream = stream
        self._stops = stops
        self._show_stop = show_stop
        self._stop_token_ids = stop_token_ids
        self._min_tokens = min_tokens
        self._pending = ""

    def push(self, token_id: int, *, stops: bool = False) -> str:
        """The text that can be shown once this token is known. `stops`: the output ended with it, as by a stop token.

        Nothing may be pushed after a stop string.
        """
        self.num_tokens += 1
        is_hidden = stops and not self._show_stop and token_id in self._stop_token_ids
        text = "" if is_hidden else self._stream.push(token_id)
        self.num_characters += len(text)
        if not self._stops or self.num_tokens < self._min_tokens:
            return text
        text = self._pending + text
        hits = [(index, stop) for stop in self._stops if (index := text.find(stop)) >= 0]
        if hits:
            begin, self.stop_string = min(hits)
            self._pending = ""
            return text[: begin + len(self.stop_string) if self._show_stop else begin]
        shown = len(text) - max(overlap(text, stop) for stop in self._stops)
        self._pending = text[shown:]
        return text[:shown]

    def rest(self) -> str:
        """The text that was held back, once the output has ended without a stop string."""
        rest, self._pending = self._pending, ""
        return rest
