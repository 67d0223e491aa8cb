"""`python -m tests.golden check|take`: see tests/golden/__init__.py."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.golden.canonical import canonical, digest

ROOT = Path(__file__).parents[2]
DIGESTS = Path(__file__).with_name("digests.json")
# Whose diagnoses, verdicts and predictions are noted.
NOTED = (
    "tests/metrics", "tests/interop", "tests/replay", "tests/diagnosis", "tests/live", "tests/loadgen/search",
    "tests/commands", "tests/scripting",
)  # fmt: skip
GENERATORS = {  # what a command prints
    "metrics.md": "sojourn.metrics.catalog.catalog",
    "json.md": "sojourn.scripting.document",
    "alerts.md": "sojourn.dashboards.document",
    "foreign-servers.md": "sojourn.interop.sources.document",
}

LEFT_OUT = ("slow", "gpu", "peer", "thorough", "server", "browser", "prometheus")  # what times or other programs decide

Digests = dict[str, str]


def streams(save: Callable[[str, str], None]) -> Digests:
    from tests.golden.streams import streams as drawn

    return {name: _digested(f"streams/{name}", value, save) for name, value in drawn()}


def predictions(save: Callable[[str, str], None]) -> Digests:
    from tests.golden.predictions import predictions as drawn

    return {name: _digested(f"predictions/{name}", value, save) for name, value in drawn()}


def generated(save: Callable[[str, str], None]) -> Digests:
    """The pages that commands write, dashboards, rules, and the help of every command."""
    found = {}
    for name, module in GENERATORS.items():
        found[name] = _kept(f"generated/{name}", _printed("-m", module), save)
    with tempfile.TemporaryDirectory() as folder:
        _printed("-m", "sojourn", "server", "dashboards", "--output", folder)
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                name = path.relative_to(folder).as_posix()
                found[f"dashboards/{name}"] = _kept(f"generated/dashboards/{name}", path.read_text(), save)
    from sojourn.commands.verbs import VERBS

    for name in (verb.name for verb in VERBS):
        text = _printed("-m", "sojourn", *name.split(), "--help")
        found[f"help/{name}"] = _kept(f"generated/help/{name}", text, save)
    return found


def tests(save: Callable[[str, str], None]) -> Digests:
    """The names of all tests, by file."""
    told = _printed("-m", "pytest", "--collect-only", "-q", "-m", "", "--color", "no", "-p", "no:cacheprovider")
    files: dict[str, list[str]] = {}
    for line in told.splitlines():
        if "::" in line and line.startswith("tests/"):
            files.setdefault(line.partition("::")[0], []).append(line)
    return {name: _kept(f"tests/{name}", "\n".join(sorted(lines)), save) for name, lines in files.items()}


def said(save: Callable[[str, str], None]) -> Digests:
    """Every diagnosis, live verdict and prediction that tests bring about, test by test."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-p", "no:schemathesis",
            "-p", "tests.golden.plugin", "--hypothesis-seed", "0", "--max-examples", "10", "-p", "no:cacheprovider",
            "-m", " and ".join(f"not {mark}" for mark in LEFT_OUT),
            *NOTED,
        ]  # fmt: skip
        subprocess.run(command, cwd=ROOT, env=os.environ | {"GOLDEN_FOLDER": folder}, stdout=sys.stderr)
        found: Digests = {}
        for path in Path(folder).glob("*.json"):
            for test, digests in json.loads(path.read_text()).items():
                found[test] = _kept(f"said/{test}", "\n".join(digests), save)
    return found


KINDS: dict[str, Callable[[Callable[[str, str], None]], Digests]] = {
    "streams": streams, "predictions": predictions, "generated": generated, "tests": tests, "said": said,
}  # fmt: skip


def _digested(name: str, value: object, save: Callable[[str, str], None]) -> str:
    return _kept(name, canonical(value), save)


def _kept(name: str, text: str, save: Callable[[str, str], None]) -> str:
    save(name, text)
    return digest(text)


def _printed(*words: str) -> str:
    environment = os.environ | {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def differences(known: dict[str, Digests], found: dict[str, Digests]) -> Iterator[str]:
    for kind, digests in found.items():
        before = known.get(kind, {})
        for name in sorted(before.keys() | digests.keys()):
            if name not in digests:
                yield f"{kind} {name}: is gone"
            elif name not in before:
                yield f"{kind} {name}: is new"
            elif before[name] != digests[name]:
                yield f"{kind} {name}: differs"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden")
    parser.add_argument("action", choices=("check", "take"))
    parser.add_argument("--only", action="append", choices=list(KINDS), help="one kind; repeatable")
    parser.add_argument("--texts", type=Path, metavar="FOLDER", help="also write what was digested")
    options = parser.parse_args()

    def save(name: str, text: str) -> None:
        if options.texts is not None:
            path = options.texts / name.replace("::", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    known = json.loads(DIGESTS.read_text()) if DIGESTS.exists() else {}
    found = {kind: KINDS[kind](save) for kind in options.only or KINDS}
    if options.action == "take":
        if "said" in found:  # some tests measure times: only what is said twice is kept
            again = said(lambda *_: None)
            found["said"] = {test: told for test, told in found["said"].items() if again.get(test) == told}
        DIGESTS.write_text(json.dumps(known | found, indent=0, sort_keys=True) + "\n")
        return 0
    if "said" in found:
        found["said"] = {test: told for test, told in found["said"].items() if test in known.get("said", {})}
    lines = list(differences(known, found))
    print("\n".join(lines) or f"equal: {', '.join(f'{len(each):,} {kind}' for kind, each in found.items())}")
    return 1 if lines else 0


if __name__ == "__main__":
    raise SystemExit(main())
