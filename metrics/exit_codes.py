"""How a command ended, as the number that scripts read: one rule for all verbs and for Locust.

`python -m sojourn.metrics.exit_codes` prints the table of docs/commands.md.
"""

from collections.abc import Mapping
from enum import IntEnum
from typing import Any


class Ended(IntEnum):
    DONE = 0
    FAILED = 1  # or the answer is no: worse, missed
    WRONG_USE = 2
    CANNOT_TELL = 3
    NOT_VALID = 4
    MOST_FAILED = 5
    FINDING = 6
    STUCK = 7
    STOPPED = 130


Meanings = Mapping[Ended, str]
EVERY_VERB: Meanings = {
    Ended.DONE: "done", Ended.FAILED: "failure", Ended.WRONG_USE: "wrong use", Ended.STOPPED: "stopped with Ctrl-C",
}  # fmt: skip
A_LOAD: Meanings = {
    Ended.DONE: "measured, whatever the diagnosis", Ended.NOT_VALID: "the run is not valid",
    Ended.MOST_FAILED: "no measured request was served, or more of them failed than were served",
}  # fmt: skip
# By the name of the verb: what it adds to EVERY_VERB, or says in other words.
OF_VERB: Mapping[str, Meanings] = {
    "load": A_LOAD,
    "run": A_LOAD | {Ended.FAILED: "failure, or with --prove the prediction missed"},
    "bench-serve": A_LOAD,
    "locust": A_LOAD | {Ended.STOPPED: "stopped with Ctrl-C; with own tasks that is an end like STOP"},
    "join": A_LOAD,
    "import": A_LOAD,
    "capacity": {
        Ended.DONE: "resolved, or all rates measured", Ended.CANNOT_TELL: "not resolved",
        Ended.NOT_VALID: "a rate of --rates has no valid run",
        Ended.MOST_FAILED: "with --rates: no request was served in a valid run",
    },
    "watch": {
        Ended.DONE: "with --once: healthy or idle", Ended.CANNOT_TELL: "cannot tell, or no server answers",
        Ended.FINDING: "a finding: degraded or overloaded", Ended.STUCK: "stuck: an engine hangs",
    },
    "triage": {
        Ended.DONE: "no problem is seen", Ended.CANNOT_TELL: "cannot tell", Ended.FINDING: "a problem is seen",
        Ended.STUCK: "stuck: an engine hangs", Ended.WRONG_USE: "wrong use, or nothing that was given can be read",
    },
    "report": {
        Ended.FAILED: "failure, or with --budget a bound is broken",
        Ended.CANNOT_TELL: "with --budget a bound was not measured",
    },
    "lint": {Ended.FAILED: "failure, or with --strict something was found"},
    "compare": {
        Ended.DONE: "no worse", Ended.FAILED: "B is worse", Ended.CANNOT_TELL: "cannot tell",
        Ended.WRONG_USE: "wrong use, or runs that cannot be compared, such as one that is not valid",
    },
    "verify": {
        Ended.DONE: "hit, or what could not be predicted", Ended.FAILED: "miss",
        Ended.WRONG_USE: "wrong use, or runs that test no prediction",
    },
    "serve": {Ended.STOPPED: "ended by a second Ctrl-C; the first lets requests finish, and ends with 0"},
    "dev ladder": {Ended.NOT_VALID: "a rung has no valid run"},
}  # fmt: skip


def meanings(verb: str) -> dict[Ended, str]:
    """Each code that a verb ends with, in their order."""
    found = {**EVERY_VERB, **OF_VERB.get(verb, {})}
    return {code: found[code] for code in sorted(found)}


def epilog(verb: str) -> str:
    """For the verb's --help; "" for a verb without codes of its own."""
    if verb not in OF_VERB:
        return ""
    return f"Exit code: {'; '.join(f'{code.value} {words}' for code, words in meanings(verb).items())}."


def of_load(valid: bool, served: int, failed: int = 0) -> Ended:
    """Of a run that was sent to its end. `served` and `failed` count the measured requests. A search, which drives the
    server beyond its capacity on purpose, gives no `failed`."""
    if not valid:
        return Ended.NOT_VALID
    return Ended.DONE if served and served >= failed else Ended.MOST_FAILED


def of_run(meta: Mapping[str, Any], served: int, failed: int) -> tuple[Ended, str]:
    """The same of a recorded run, by its run.json, and why it is not 0. A run of another tool that does not say
    whether it is valid counts as valid."""
    code = of_load(meta["valid"] is not False, served, failed)
    if code is Ended.NOT_VALID:
        first, *more = meta.get("invalid_reasons") or ["no reason is given"]
        return code, f"the run is not valid: {first.partition(';')[0]}{f'; and {len(more)} more' if more else ''}"
    return code, f"{failed:,} of {served + failed:,} measured requests failed" if code else ""


def table() -> str:
    """Markdown for docs/commands.md."""
    by_meanings: dict[tuple[tuple[Ended, str], ...], list[str]] = {}
    for verb, own in OF_VERB.items():
        by_meanings.setdefault(tuple(sorted(own.items())), []).append(f"`{verb}`")
    rows = [("every command, unless it says otherwise", tuple(EVERY_VERB.items()))]
    rows += [(", ".join(verbs), own) for own, verbs in by_meanings.items()]
    lines = [f"| {verbs} | {'; '.join(f'**{code.value}** {words}' for code, words in own)} |" for verbs, own in rows]
    return "\n".join(["| command | exit codes |", "|---|---|", *lines])


if __name__ == "__main__":
    print(table())
