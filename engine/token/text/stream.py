"""Ids of one output → text, piece by piece: in all, decode(prompt + output) less decode(prompt)."""

from collections.abc import Callable, Mapping, Sequence

from sojourn.engine.token.text.decoders import Decoder
from sojourn.engine.token.text.stages import ByteFallback, Stage, finished, through


class TextStream:
    """Never raises: what is no character is U+FFFD.

    `entry_of` gives the entry of an id, None for one that has no text. `shown` has ids that have a text of their own.
    `prompt` are the ids before the output. With `keeps_blank` an output without text before it keeps its first blank.
    """

    def __init__(
        self,
        decoder: Decoder,
        entry_of: Callable[[int], str | None],
        shown: Mapping[int, str],
        prompt: Sequence[int] = (),
        *,
        keeps_blank: bool = False,
    ):
        self._decoder, self._entry_of, self._shown = decoder, entry_of, shown
        self._stages: list[Stage] = decoder.stages()
        found = [stage for stage in self._stages if isinstance(stage, ByteFallback)]
        self._run = found[0] if found else ByteFallback()
        self._skipped = 0  # characters of the prompt's text that are not certain yet
        self._num_certain = 0
        self._num_ahead = 0  # characters of an open run of bytes
        if keeps_blank:
            through(self._stages, "a")
        if prompt:
            self._begin(prompt)

    def push(self, token_id: int) -> str:
        """The text that this token makes certain; "" while there is none."""
        item = self._item(token_id)
        if item is None:
            self._run.ahead = ""
            return ""
        text = through(self._stages, item)
        if self._skipped:
            cut = min(self._skipped, len(text))
            text, self._skipped = text[cut:], self._skipped - cut
        self._num_certain += len(text)
        self._num_ahead = self._run.num_characters
        return text

    @property
    def num_characters(self) -> int:
        """Of the text so far, with those of bytes that are characters so far."""
        return self._num_certain + max(0, self._num_ahead - self._skipped)

    @property
    def ahead(self) -> str:
        """The characters that the last token completed, but which the next one may make U+FFFD."""
        return self._run.ahead

    @property
    def num_open(self) -> int:
        """Tokens whose bytes may be characters or U+FFFD."""
        return self._run.num_open

    @property
    def is_broken(self) -> bool:
        """The run of bytes is no UTF-8."""
        return self._run.is_broken

    def rest(self) -> str:
        """The text that an end here would add."""
        return finished(self._stages)[self._skipped :]

    def _begin(self, prompt: Sequence[int]) -> None:
        """Puts the stages where the prompt leaves them: by its first entries, and those behind the last anchor."""
        first, size = 0, len(prompt)
        while first < size and not ((item := self._item(prompt[first])) is not None and through(self._stages, item)):
            first += 1
        tail = []
        for index in range(size - 1, first, -1):
            if (item := self._item(prompt[index])) is not None:
                tail.append(item)
                if self._decoder.is_anchor(item):
                    break
        for item in reversed(tail):
            through(self._stages, item)
        self._skipped = len(finished(self._stages))
        self._num_ahead = self._run.num_characters
        self._run.ahead = ""

    def _item(self, token_id: int) -> str | None:
        """What the stages get of a token; None for one without text."""
        if (shown := self._shown.get(token_id)) is not None:
            return shown
        entry = self._entry_of(token_id)
        return None if entry is None else self._decoder.map(entry)
