"""Fuzzes all targets in turn at the lowest priority, one process at a time. A later call goes on where this one ended.

Inputs that reach new code stay in the working folder; `--save` copies the smallest of them
into tests/fuzz/corpus, where a test replays them.
"""

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from bench.fuzz.corpus import CORPUS, save
from bench.fuzz.live import LIVE
from bench.fuzz.targets import TARGETS

ROOT = Path(__file__).parent.parent.parent
SLICE_SECONDS = 20  # of one target with weight 1, in one round
HANG_SECONDS = 20  # an input that takes longer hangs; far above the longest time on a busy machine
RSS_LIMIT_MB = 2048
WEIGHTS = {name: weight for name, (_, weight) in TARGETS.items()} | {name: 2 for name in LIVE}


class Progress(msgspec.Struct):
    """Of one target, over all calls."""

    seconds: float = 0.0
    inputs: int = 0
    findings: dict[str, str] = {}  # what happened → the file with the input


def fuzz_slice(name: str, seconds: int, work: Path, progress: Progress) -> None:
    """One slice of one target, in a process of its own."""
    log = work / "logs" / f"{name}.log"
    started = time.monotonic()
    with log.open("wb") as output:
        done = subprocess.run(
            live_command(name, seconds, work) if name in LIVE else parser_command(name, seconds, work),
            cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, timeout=seconds * 4 + 300,
        )  # fmt: skip
    progress.seconds += time.monotonic() - started
    text = log.read_text(errors="replace")
    counts = re.findall(r"^#(\d+)\s|^(\d+) inputs", text, re.MULTILINE)
    progress.inputs += max((int(a or b) for a, b in counts), default=0)
    if done.returncode != 0:
        file = re.search(r"Test unit written to (\S+)", text)
        kept = log.with_name(f"{name}-{int(time.time())}.log")
        kept.write_text(text)
        what = cause(text) or f"ended with {done.returncode}"
        if what not in progress.findings:
            progress.findings[what] = file[1] if file else str(kept)
            print(f"FAIL   {name}: {what}; log {kept}", flush=True)


def parser_command(name: str, seconds: int, work: Path) -> list[str]:
    found = work / "corpus" / name
    found.mkdir(parents=True, exist_ok=True)
    seeds = [str(CORPUS / name)] if (CORPUS / name).is_dir() else []
    return [
        sys.executable, "-m", "bench.fuzz.one", name, str(found), *seeds, f"-max_total_time={seconds}",
        f"-timeout={HANG_SECONDS}", f"-rss_limit_mb={RSS_LIMIT_MB}", f"-artifact_prefix={work}/findings/{name}-",
        "-print_final_stats=0",
    ]  # fmt: skip


def live_command(name: str, seconds: int, work: Path) -> list[str]:
    return [sys.executable, "-m", "bench.fuzz.live", name, "--seconds", str(seconds), "--work", str(work)]


def cause(text: str) -> str | None:
    """The last exception of a log with the line of ours that raised it, or libFuzzer's own verdict."""
    places = re.findall(r'File "([^"]+)", line (\d+)', text)
    own = [f"{Path(file).name}:{line}" for file, line in places if "site-packages" not in file and "fuzz" not in file]
    errors = re.findall(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception|Defect|Exit|Panic)\w*)(?:: (.*))?$", text, re.MULTILINE)
    verdict = re.search(r"ERROR: libFuzzer: (.*)", text) or re.search(r"^FAIL (.*)$", text, re.MULTILINE)
    if errors:
        return f"{errors[-1][0]} {errors[-1][1][:160]} at {own[-1] if own else '?'}"
    return verdict[1][:200] if verdict else None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60, help="of this call; 60 by default")
    parser.add_argument(
        "--only", nargs="+", choices=WEIGHTS, default=list(WEIGHTS), metavar="TARGET", help=", ".join(WEIGHTS)
    )
    parser.add_argument("--work", type=Path, default=ROOT / ".fuzz", help="working folder; .fuzz by default")
    parser.add_argument("--save", action="store_true", help="at the end, copy the smallest inputs to tests/fuzz/corpus")
    arguments = parser.parse_args()
    if importlib.util.find_spec("atheris") is None:
        sys.exit("bench.fuzz: atheris is missing; install it with `pip install -e '.[fuzz]'` (Linux and macOS)")
    os.nice(19)
    work = arguments.work.resolve()
    for folder in ("logs", "findings", "corpus"):
        (work / folder).mkdir(parents=True, exist_ok=True)
    state = work / "progress.json"
    all_progress = msgspec.json.decode(state.read_bytes(), type=dict[str, Progress]) if state.exists() else {}
    before = sum(len(progress.findings) for progress in all_progress.values())
    end = time.monotonic() + arguments.minutes * 60
    while time.monotonic() < end:
        for name in arguments.only:
            seconds = int(min(SLICE_SECONDS * WEIGHTS[name], end - time.monotonic()))
            if seconds < 1:
                break
            progress = all_progress.setdefault(name, Progress())
            try:
                fuzz_slice(name, seconds, work, progress)
            except subprocess.TimeoutExpired:
                progress.findings[f"the process did not end in its {seconds} s"] = str(work / "logs" / f"{name}.log")
                print(f"FAIL   {name}: the process did not end", flush=True)
            state.write_bytes(msgspec.json.format(msgspec.json.encode(all_progress), indent=1))
    if arguments.save:
        save(arguments.only, work)
    for name, progress in all_progress.items():
        print(
            f"{name:16} {progress.seconds / 60:6.1f} min {progress.inputs:12,} inputs {len(progress.findings)} findings"
        )
    after = sum(len(progress.findings) for progress in all_progress.values())
    sys.exit(1 if after > before else 0)


if __name__ == "__main__":
    main()
