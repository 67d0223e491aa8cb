"""The outcome of a torture script: one line for each promise, JSON on request, exit code 1 if a promise is broken."""

import argparse
import os
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

PASS, FAIL, MISSED, SKIP = "PASS", "FAIL", "MISSED", "SKIP"


class Promise(msgspec.Struct, frozen=True):
    """One promise and what was measured of it.

    FAIL: the behaviour is wrong, on any machine. MISSED: a time or a size is over its bound, which a busy machine may
    cause. SKIP: it cannot be measured here; `figure` gives the reason.
    """

    verdict: str
    text: str
    figure: str
    bound: str = ""

    def line(self) -> str:
        return f"{self.verdict:6} {self.text}: {self.figure}" + (f" ({self.bound})" if self.bound else "")


class Outcome(msgspec.Struct):
    """All promises of one script. `load_average` is that of the last minute before it started."""

    script: str
    command: str
    date: str  # ISO 8601, UTC
    load_average: float
    seconds: float = 0.0
    promises: list[Promise] = []

    def check(self, text: str, holds: bool, figure: object, bound: str = "") -> bool:
        """A behaviour that no load excuses."""
        return self._add(PASS if holds else FAIL, text, str(figure), bound)

    def below(self, text: str, value: float | None, bound: float, unit: str, note: str = "") -> bool:
        """A figure with an upper bound. None: it could not be measured, which is a failure."""
        more = f"; {note}" if note else ""
        if value is None:
            return self._add(FAIL, text, "no measurement" + more, f"at most {bound:g} {unit}")
        return self._add(
            PASS if value <= bound else MISSED, text, f"{value:,.4g} {unit}{more}", f"at most {bound:,g} {unit}"
        )

    def skip(self, text: str, reason: str) -> None:
        self._add(SKIP, text, reason)

    @property
    def holds(self) -> bool:
        return all(promise.verdict in (PASS, SKIP) for promise in self.promises)

    def _add(self, verdict: str, text: str, figure: str, bound: str = "") -> bool:
        promise = Promise(verdict, text, figure, bound)
        self.promises.append(promise)
        print(promise.line(), flush=True)
        return verdict == PASS


def new_outcome(script: str, command: str) -> Outcome:
    return Outcome(script, command, datetime.now(UTC).isoformat(timespec="seconds"), round(os.getloadavg()[0], 1))


def main(script: str, run: Callable[[Outcome, argparse.Namespace], None], **options: dict) -> None:
    """The command line of a script. `run(outcome, arguments)` measures; `options` are more arguments of argparse, such
    as `minutes={"type": float, "default": 30}`. Does not return.
    """
    parser = argparse.ArgumentParser(prog=f"python -m bench.torture.{script}", description=run.__doc__)
    parser.add_argument("--short", action="store_true", help="seconds instead of minutes: fewer calls, fewer rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcome to this file")
    for name, option in options.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **option)
    arguments = parser.parse_args()
    words = [word for word in sys.argv[1:] if not word.startswith("--json") and word != str(arguments.json)]
    outcome = new_outcome(script, " ".join([parser.prog, *words]))
    started = time.monotonic()
    try:
        run(outcome, arguments)
    except TortureError as error:
        outcome.check(f"{script} runs to its end", False, error)
    outcome.seconds = round(time.monotonic() - started, 1)
    if arguments.json:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(outcome), indent=1))
    sys.exit(0 if outcome.holds else 1)


class TortureError(Exception):
    """The measurement itself cannot go on: a server does not start, a client process ends."""
