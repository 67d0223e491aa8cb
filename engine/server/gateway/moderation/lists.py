"""Lists as a Moderator: they check whole texts, and an output as it grows."""

import asyncio
from collections.abc import Sequence

from sojourn.engine.server.gateway.moderation.scanner import TextList, matches
from sojourn.engine.server.gateway.moderation.verdict import Kind, Span, Verdict

OFF_LOOP_CHARACTERS = 2000  # longer texts are searched in a thread, so that no stream waits for them


class ListModerator:
    """Words, or expressions, of one check of the moderation file. It needs nobody else, so it never fails."""

    allows_on_failure = False

    def __init__(self, name: str, lists: Sequence[TextList]):
        self.name = name
        self.lists = tuple(lists)
        self.categories = tuple(dict.fromkeys(category for listed in lists for category in listed.categories))

    async def check(self, text: str, kind: Kind) -> Verdict:
        if len(text) <= OFF_LOOP_CHARACTERS:
            return self.verdict(text)
        return await asyncio.to_thread(self.verdict, text)

    def verdict(self, text: str) -> Verdict:
        spans: list[Span] = []
        for listed in self.lists:
            spans += matches(listed, text)
        flagged = frozenset(span.category for span in spans)
        return Verdict(flagged, dict.fromkeys(flagged, 1.0), tuple(sorted(spans)))

    async def close(self) -> None:
        """Nothing is open."""
