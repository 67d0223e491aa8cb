"""A disk that is full, read-only or gone: the calls are served, the loss is counted and told, the rest can be read."""

import argparse
import contextlib
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.torture.client import Call, Loop, call_all, completion
from bench.torture.promises import Outcome, main
from bench.torture.server import Server, serving, temporary_folder, wait_until
from sojourn.metrics.errors import SojournError
from sojourn.metrics.run.directory import RunDirectory

FAILED = "sojourn_telemetry_failed_records_total"
TOLD_SECONDS = 5  # after the first record that is lost


def file_size(limit: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path | None]:
    """A file system of its own; None where this user may mount none."""
    mounted = folder / "disk"
    mounted.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(mounted)], capture_output=True)
    try:
        yield mounted if done.returncode == 0 else None
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", "-l", str(mounted)], capture_output=True)


def load(server: Server, seconds: float) -> tuple[int, int]:
    """Calls, and those that were answered."""
    answers = call_all(server.url, loops=[Loop(Call(completion(24), timeout_s=20), 8, seconds)], keep_events=False)
    return len(answers.answers), len(answers.ended("done"))


def fails_and_serves(outcome: Outcome, name: str, server: Server, run_dir: Path, seconds: float) -> None:
    """What holds once nothing can be written any more."""
    calls, served = load(server, seconds)
    outcome.check(f"{name}: every call is served", calls == served > 0, f"{served} of {calls}")
    counted = wait_until(lambda: server.metric(FAILED) > 0, TOLD_SECONDS)
    outcome.check(f"{name}: lost records are counted", counted is not None, f"{server.metric(FAILED):.0f}")
    lines = [line for line in server.text().splitlines() if "record" in line]
    outcome.check(f"{name}: the log tells it, once and soon", 0 < len(lines) <= 3, lines[:1] or "nothing")
    server.send_signal(15)
    code, text = server.wait(60), server.text()
    outcome.check(f"{name}: ends with exit code 1 and without a traceback", code == 1 and "Traceback" not in text,
                  f"exit code {code}; {text.strip().splitlines()[-1][:160]}")  # fmt: skip
    if run_dir.exists():
        outcome.check(f"{name}: what was written can be read", *readable(run_dir))


def readable(run_dir: Path) -> tuple[bool, str]:
    try:
        run = RunDirectory.open(run_dir)
        return True, f"{len(run.arrow('requests'))} requests, {len(run.arrow('steps')):,} steps"
    except SojournError as error:
        return False, str(error)


def full(outcome: Outcome, seconds: float) -> None:
    with temporary_folder() as folder, small_disk(folder, "300k") as disk:
        if disk is None:
            return outcome.skip("full disk", "this user may mount no file system")
        with serving("--run-dir", str(disk / "run")) as server:
            fails_and_serves(outcome, "full disk", server, disk / "run", seconds)


def file_limit(outcome: Outcome, seconds: float) -> None:
    with temporary_folder() as folder:
        run_dir = folder / "run"
        with serving("--run-dir", str(run_dir), limits=file_size(60_000)) as server:
            fails_and_serves(outcome, "files of 60 kB at most", server, run_dir, seconds)


def removed(outcome: Outcome, seconds: float) -> None:
    with temporary_folder() as folder:
        run_dir = folder / "run"
        with serving("--run-dir", str(run_dir)) as server:
            load(server, 1)
            shutil.rmtree(run_dir)
            fails_and_serves(outcome, "run directory removed", server, run_dir, seconds)


def read_only(outcome: Outcome, seconds: float) -> None:
    with temporary_folder() as folder, small_disk(folder, "8m") as disk:
        if disk is None:
            return outcome.skip("read-only disk", "this user may mount no file system")
        with serving("--run-dir", str(disk / "run")) as server:
            load(server, 1)
            with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
                while True:
                    filler.write(b"x" * 65_536)
            fails_and_serves(outcome, "disk that fills while it serves", server, disk / "run", seconds)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], capture_output=True)
        refused_at_start(outcome, "read-only disk", disk / "another")


def refused_at_start(outcome: Outcome, name: str, run_dir: Path) -> None:
    with serving("--run-dir", str(run_dir), wait_ready=False) as server:
        started = time.monotonic()
        code = server.wait(60)
        text = server.text()
    clean = code not in (None, 0) and "Traceback" not in text
    last = text.strip().splitlines()[-1][:160] if text.strip() else "nothing"
    outcome.check(f"{name}: refused at the start with a sentence", clean, f"exit code {code}; {last}")
    outcome.below(f"{name}: refused after", time.monotonic() - started, 30, "s")


def run(outcome: Outcome, arguments: argparse.Namespace) -> None:
    """Disks that take nothing."""
    seconds = 3 if arguments.short else 15
    full(outcome, seconds)
    removed(outcome, seconds)
    file_limit(outcome, seconds)
    read_only(outcome, seconds)
    with temporary_folder() as folder:
        (folder / "file").write_text("x")
        refused_at_start(outcome, "a file in its place", folder / "file")
        refused_at_start(outcome, "a folder that cannot be made", folder / "file" / "run")


if __name__ == "__main__":
    main("disk", run)
