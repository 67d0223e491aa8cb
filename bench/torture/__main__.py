"""Runs the torture scripts one after the other, and writes docs/results/reliability.md from what they found."""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from bench.torture.document import write_document
from bench.torture.promises import FAIL, MISSED, Outcome, new_outcome
from bench.torture.server import ROOT, temporary_folder

# Script and the seconds after which it is ended, in its short and in its full form.
SCRIPTS = {
    "overload": (120, 900),
    "core_death": (120, 900),
    "signals": (120, 900),
    "aborts": (60, 600),
    "slow_readers": (90, 900),
    "connections": (90, 900),
    "bodies": (120, 900),
    "disk": (120, 600),
    "load_generator": (120, 600),
    "models": (120, 900),
    "secrets": (60, 300),
    "soak": (300, 3000),
    "kills": (120, 7200),
}


def run_script(name: str, short: bool, folder: Path) -> Outcome:
    """In a process of its own, whose end ends its servers."""
    file = folder / f"{name}.json"
    command = [sys.executable, "-m", f"bench.torture.{name}", "--json", str(file), *(["--short"] if short else [])]
    limit = SCRIPTS[name][0 if short else 1]
    try:
        code = subprocess.run(command, cwd=ROOT, timeout=limit).returncode
        ended = f"it ended with {code} and without an outcome"
    except subprocess.TimeoutExpired:
        ended = f"it did not end in {limit} s"
    if file.exists():
        return msgspec.json.decode(file.read_bytes(), type=Outcome)
    outcome = new_outcome(name, " ".join(command[1:3]))
    outcome.check(f"{name} runs to its end", False, ended)
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.torture", description=__doc__)
    parser.add_argument("--short", action="store_true", help="the form that runs in CI: minutes in all")
    parser.add_argument(
        "--only", nargs="+", choices=SCRIPTS, default=list(SCRIPTS), metavar="SCRIPT", help=", ".join(SCRIPTS)
    )
    parser.add_argument("--skip", nargs="+", choices=SCRIPTS, default=[], metavar="SCRIPT")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all outcomes to this file")
    parser.add_argument(
        "--write", action="store_true", help="write docs/results/reliability.md; other scripts keep their rows"
    )
    parser.add_argument(
        "--allow-missed", action="store_true", help="exit code 0 also with MISSED figures: for machines that others use"
    )
    arguments = parser.parse_args()
    outcomes = []
    started = time.monotonic()
    with temporary_folder() as folder:
        for name in arguments.only:
            if name in arguments.skip:
                continue
            print(f"== {name}", flush=True)
            outcomes.append(run_script(name, arguments.short, folder))
    if arguments.json:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(outcomes), indent=1))
    if arguments.write:
        write_document(outcomes)
    bad = {FAIL} if arguments.allow_missed else {FAIL, MISSED}
    broken = [outcome.script for outcome in outcomes if bad & {promise.verdict for promise in outcome.promises}]
    verdict = f"broken: {', '.join(broken)}" if broken else "all promises hold"
    print(f"{len(outcomes)} script{'s' * (len(outcomes) != 1)} in {time.monotonic() - started:.0f} s; {verdict}")
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
