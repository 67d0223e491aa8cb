"""What a profile checks and does: its rules for inputs and outputs, and the checks of a whole text."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from sojourn.engine.server.gateway.moderation.list_filter import Action, ListRule
from sojourn.engine.server.gateway.moderation.lists import ListModerator
from sojourn.engine.server.gateway.moderation.verdict import Kind, ModerationFailed, Moderator, Verdict

Role = Literal["system", "developer", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Rule:
    """A check and what happens to a text that it flags."""

    moderator: Moderator
    action: Action
    replacement: str = ""


class Events:
    """What moderation did, since the start: read by telemetry when somebody asks."""

    def __init__(self) -> None:
        self.flagged: dict[tuple[Kind, str, str], int] = {}  # kind, category and action → texts or matches
        self.failed: dict[str, int] = {}  # check → texts without a verdict

    def flag(self, kind: Kind, category: str, action: Action, number: int = 1) -> None:
        key = (kind, category, action)
        self.flagged[key] = self.flagged.get(key, 0) + number

    def fail(self, check: str) -> None:
        self.failed[check] = self.failed.get(check, 0) + 1


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a profile says of one text."""

    blocked: tuple[str, ...] = ()  # categories for which it must not go on
    verdicts: tuple[Verdict, ...] = ()


@dataclass(frozen=True, slots=True)
class Profile:
    """Rules by name in the moderation file."""

    name: str
    message: str  # of a refusal
    roles: frozenset[Role] | None  # whose messages are checked; None: the whole prompt as the model sees it
    input_rules: tuple[Rule, ...]
    output_rules: tuple[Rule, ...]
    holds: bool = True  # an output is shown after its verdict; else the output ends when a verdict flags it
    window_characters: int = 400
    events: Events = field(default_factory=Events, compare=False)

    @property
    def list_rules(self) -> list[ListRule]:
        """Of outputs, one for each list."""
        return [
            ListRule(listed, rule.action, rule.replacement)
            for rule in self.output_rules
            if isinstance(rule.moderator, ListModerator)
            for listed in rule.moderator.lists
        ]

    @property
    def window_rules(self) -> list[Rule]:
        """Of outputs: checks that need a sentence, not a character."""
        return [rule for rule in self.output_rules if not isinstance(rule.moderator, ListModerator)]

    async def judge(self, text: str, kind: Kind, rules: Sequence[Rule]) -> Judgement:
        """All checks side by side. Raises ModerationFailed where one has no verdict and does not let the text pass."""
        verdicts = await asyncio.gather(*(self._verdict(rule.moderator, text, kind) for rule in rules))
        blocked: list[str] = []
        for rule, verdict in zip(rules, verdicts, strict=True):
            for category in sorted(verdict.flagged):
                self.events.flag(kind, category, rule.action)
                if rule.action == "block" and category not in blocked:
                    blocked.append(category)
        return Judgement(tuple(blocked), tuple(verdicts))

    async def _verdict(self, moderator: Moderator, text: str, kind: Kind) -> Verdict:
        try:
            return await moderator.check(text, kind)
        except ModerationFailed:
            self.events.fail(moderator.name)
            if moderator.allows_on_failure:
                return Verdict()
            raise
