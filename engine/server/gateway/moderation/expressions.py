"""Regular expressions, searched in linear time by RE2: no expression can stall the server."""

from collections.abc import Iterator

import re2

from sojourn.engine.server.gateway.moderation.scanner import Scan
from sojourn.engine.server.gateway.moderation.verdict import Span
from sojourn.metrics.errors import InputError

MAX_MATCH_CHARACTERS = 2000
BLOCK_CHARACTERS = 1024  # that are searched at a time: bounds the work behind a match that is too long


class Expression:
    """One expression in RE2's syntax. Finds its matches that do not overlap, from the left. The text is not folded.

    Longer matches than `max_characters` are not looked for: so much is held back from where one may begin. Raises
    InputError for an expression that RE2 does not take, or that matches an empty text.
    """

    context_characters = 1  # what \\b looks at

    def __init__(self, pattern: str, category: str, max_characters: int):
        self.categories = (category,)
        self.max_held_characters = max_characters
        options = re2.Options()
        options.log_errors = False
        try:
            self._expression = re2.compile(pattern, options)
        except re2.error as error:
            reason = error.args[0].decode("utf-8", "replace") if isinstance(error.args[0], bytes) else error
            raise InputError(f"{pattern!r} is no expression of RE2: {reason}") from None
        if self._expression.fullmatch("") is not None:
            raise InputError(f"{pattern!r} matches an empty text, and so everywhere; let it match a character at least")
        try:
            least, most = self._expression.possiblematchrange(1)
        except re2.error:
            least = most = b""
        self._first_bytes = range(least[0] if least else 0, (most[0] if most else 255) + 1)

    def scan(self, text: str, begin: int, *, final: bool) -> Scan:
        size = len(text)
        # A match that begins before it is decided: all its characters are there, and the one behind them.
        open_from = size if final else max(begin, size - self.max_held_characters)
        spans = [Span(first, end, self.categories[0]) for first, end in self._matches(text, begin, open_from)]
        if spans:
            open_from = max(open_from, spans[-1].end)
        while open_from < size and text[open_from].encode("utf-8", "replace")[0] not in self._first_bytes:
            open_from += 1
        return Scan(spans, open_from)

    def _matches(self, text: str, position: int, stop: int) -> Iterator[tuple[int, int]]:
        """Begin and end of the matches that begin between `position` and `stop`."""
        expression, size, longest = self._expression, len(text), self.max_held_characters
        while position < stop:
            limit = min(stop, position + BLOCK_CHARACTERS)
            found = expression.search(text, position, min(size, limit + longest))
            if found is None or found.start() >= limit:
                position = limit
                continue
            first = found.start()
            found = expression.match(text, first, min(size, first + longest))
            if found is None or found.end() == first:
                position = first + 1
                continue
            yield first, found.end()
            position = found.end()
