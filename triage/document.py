"""What a triage says, as data: the terminal, `--json`, Python and the MCP tool all show this."""

from typing import Literal

import msgspec

from sojourn.metrics.exit_codes import Ended

# What a statement rests on, the strongest first. `summary` knows no time and no server.
Level = Literal["requests", "page", "log", "sensor", "setting", "summary"]
State = Literal["stuck", "problem", "no problem seen", "cannot tell"]


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of evidence that was read."""

    name: str  # as the user gave it
    kind: str
    label: str  # which of several: "stage 5", "concurrency 16"
    shows: str  # its first figures, in a line


class Certain(msgspec.Struct, frozen=True, kw_only=True):
    """What the evidence states or follows from it by definition."""

    sentence: str
    level: Level
    source: str  # name of the evidence
    is_problem: bool = True


class Likely(msgspec.Struct, frozen=True, kw_only=True):
    """A cause, with what speaks for it and what would look alike."""

    key: str  # of the rule, or of the diagnosis' cause
    cause: str
    confidence: float  # 0 to 1
    level: Level
    evidence: str
    rivals: list[str]
    source: str
    change: str = ""  # what to try, where the cause is a limit whose setting is known


class Triage(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer."""

    schema: str = "sojourn.triage/1"
    state: State
    headline: str
    seen: list[Seen]
    certain: list[Certain]
    likely: list[Likely]  # most confident first
    unknowable: list[str]  # what this evidence cannot show
    unread: list[str]  # what was given and could not be read, and what to give instead
    next: str  # one command


def exit_code(found: Triage) -> Ended:
    if found.state == "stuck":
        return Ended.STUCK
    if found.state == "problem":
        return Ended.FINDING
    return Ended.DONE if found.state == "no problem seen" else Ended.CANNOT_TELL
