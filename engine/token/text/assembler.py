"""The text of one output, assembled token by token, for the server and for offline use."""

from collections.abc import Sequence

from sojourn.engine.sampling import SamplingParams
from sojourn.engine.token.text.stream import TextStream
from sojourn.engine.token.text.tokenizer import NoText, NoTokenizer, Tokenizer
from sojourn.engine.token.tools.calls import overlap


def assembler_of(
    tokenizer: Tokenizer | NoTokenizer,
    prompt: Sequence[int],
    sampling: SamplingParams,
    stops: Sequence[str] = (),
    *,
    show_stop: bool = False,
    skip_special_tokens: bool = True,
    shown_token_ids: frozenset[int] = frozenset(),
) -> "TextAssembler":
    """The text of an output as its request wants it."""
    stream = tokenizer.stream(
        prompt,
        skip_special_tokens=skip_special_tokens,
        shown_token_ids=shown_token_ids,
        keeps_blank=sampling.grammar is not None,
    )
    stop_token_ids = frozenset(sampling.stop_token_ids)
    return TextAssembler(
        stream, stops, show_stop=show_stop, stop_token_ids=stop_token_ids, min_tokens=sampling.min_tokens
    )


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
        self.offsets: list[int] = []  # characters of output before each token
        self.stop_string: str | None = None  # the one that ended the text
        self._stream = stream
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._show_stop = show_stop
        self._stop_token_ids = stop_token_ids
        self._min_tokens = min_tokens
        self._open: list[int] = []  # tokens whose bytes may be characters or U+FFFD
        self._pending = ""
        self._num_shown = 0  # characters before `_pending`
        self._search_from = 0  # characters that `min_tokens` exempts
        self._window = ""  # the end of the text, with characters that are not certain

    @property
    def num_characters(self) -> int:
        """With those that are held back."""
        return self._stream.num_characters

    @property
    def num_open(self) -> int:
        """The latest tokens, where their offsets may change."""
        return len(self.offsets) - self._open[0] if self._open else 0

    def push(self, token_id: int, *, stops: bool = False) -> str:
        """The text that can be shown once this token is known. `stops`: the output ended with it, as by a stop token.

        Nothing may be pushed after a stop string.
        """
        self.offsets.append(self._stream.num_characters)
        if stops and not self._show_stop and token_id in self._stop_token_ids:
            return ""
        num_open = self._stream.num_open
        text = self._stream.push(token_id)
        self._place(is_open=self._stream.num_open > num_open)
        if not self._stops:
            return text
        if len(self.offsets) < self._min_tokens:
            self._search_from = self._stream.num_characters
        text = self._pending + text
        shown = self._cut(text)
        if shown is None:
            begin = self._begin
            end = len(text) - max(overlap(text[begin:], stop) for stop in self._stops)
            shown, self._pending = text[:end], text[end:]
            self._num_shown += end
            if self._stream.num_open and self._finds_ahead():
                return shown + (self._cut(self._pending + self._stream.rest()) or "")
        return shown

    def rest(self) -> str:
        """The text that was held back, once the output has ended without a stop string: this may still find one."""
        rest, self._pending = self._pending + self._stream.rest(), ""
        cut = self._cut(rest)
        return rest if cut is None else cut

    @property
    def _begin(self) -> int:
        """Where the search of the pending text begins."""
        return max(0, self._search_from - self._num_shown)

    def _cut(self, text: str) -> str | None:
        """The text up to a stop string; None where it has none."""
        hits = [(index, stop) for stop in self._stops if (index := text.find(stop, self._begin)) >= 0]
        if not hits:
            return None
        begin, self.stop_string = min(hits)
        self._pending = ""
        return text[: begin + len(self.stop_string) if self._show_stop else begin]

    def _finds_ahead(self) -> bool:
        """Whether the text would hold a stop string if it ended here. Looks at the last characters only: a run of
        bytes may be long."""
        if len(self._open) == 1:
            self._window = self._pending
        if not (ahead := self._stream.ahead):
            return False
        window = self._window + ahead
        self._window = window[max(0, len(window) + 1 - self._longest) :]
        if not any(stop in window for stop in self._stops):
            return False
        rest = self._pending + self._stream.rest()
        return any(rest.find(stop, self._begin) >= 0 for stop in self._stops)

    def _place(self, *, is_open: bool) -> None:
        """`is_open`: the latest token is of a run of bytes. A run that is no UTF-8 has a character for each of them."""
        if is_open:
            self._open.append(len(self.offsets) - 1)
        elif self._open and not self._stream.num_open:
            if self._stream.is_broken:
                at, opened = self._stream.num_characters - 1 - len(self._open), set(self._open)
                for index in range(self._open[0], len(self.offsets)):
                    self.offsets[index] = max(0, at)
                    at += index in opened
            self._open.clear()
