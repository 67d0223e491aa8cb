"""The load generator against servers that fail, and on a machine that fails: it ends, and says what was lost."""

import argparse
import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bench.torture.hostile_server import WAYS, hostile
from bench.torture.promises import Outcome, main
from bench.torture.server import descendants, living, serving, start_session, temporary_folder, wait_until
from sojourn.metrics.errors import SojournError
from sojourn.metrics.run.directory import RunDirectory

RUN_SECONDS = 120  # of a load of a few seconds: far above what it takes


def scenario(folder: Path, rate: float, seconds: float, timeout_s: float = 2) -> Path:
    content = {
        "name": "hostile", "description": "a load on a server that fails", "target": {"timeout_s": timeout_s},
        "arrivals": {"process": "constant", "rate_rps": rate, "count": round(rate * seconds)},
        "workload": {"classes": [{"klass": "chat", "prompt_tokens": 8, "output_tokens": 5}]},
        "objectives": [{"ttft_ms": 1000, "source": "no objective is judged here"}],
    }  # fmt: skip
    file = folder / "hostile.yaml"
    file.write_text(json.dumps(content))  # which is YAML
    return file


def start(
    url: str, folder: Path, rate: float, seconds: float, limits: Callable[[], None] | None = None
) -> subprocess.Popen:
    command = [sys.executable, "-m", "sojourn", "load", str(scenario(folder, rate, seconds)), "--base-url", url]
    command += ["--run-dir", str(folder / "run")]
    return start_session(command, folder / "load.log", limits=limits)


def ended(process: subprocess.Popen) -> int | None:
    try:
        return process.wait(RUN_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None


def statuses(run_dir: Path) -> dict[str, int]:
    """How many calls of the run had each status."""
    try:
        return RunDirectory.open(run_dir).table("client").status.value_counts().to_dict()
    except SojournError:
        return {}


def hostile_servers(outcome: Outcome, ways: tuple[str, ...], seconds: float) -> None:
    for way in ways:
        with temporary_folder() as folder, hostile(way) as server:
            code = ended(start(server.url, folder, 15, seconds))
            text = (folder / "load.log").read_text(errors="replace")
            found = statuses(folder / "run")
        failed = sum(count for status, count in found.items() if status != "ok")
        told = sum(found.values()) == round(15 * seconds) and failed > 0
        outcome.check(f"server {way}: every call is recorded", told, found)
        outcome.check(f"server {way}: the exit code says failure", code not in (None, 0) and "Traceback" not in text,
                      f"exit code {code}")  # fmt: skip


def no_server(outcome: Outcome) -> None:
    for name, url in (("no such host", "http://no-such-host.invalid:80"), ("nothing listens", "http://127.0.0.1:9")):
        with temporary_folder() as folder:
            code = ended(start(url, folder, 5, 1))
            text = (folder / "load.log").read_text(errors="replace")
            exists = (folder / "run").exists()
        clean = code == 1 and "Traceback" not in text and not exists
        outcome.check(f"{name}: exit code 1, a sentence, no folder", clean, f"exit code {code}; {text.strip()[-140:]}")


def failing_machine(outcome: Outcome, seconds: float) -> None:
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    with serving() as server:
        with temporary_folder() as folder:
            code = ended(start(server.url, folder, 30, seconds, small_files))
            text = (folder / "load.log").read_text(errors="replace")
        outcome.check("full disk: exit code 1, a sentence, no traceback", code == 1 and "Traceback" not in text,
                      f"exit code {code}; {text.strip()[-140:]}")  # fmt: skip
        with temporary_folder() as folder:
            process = start(server.url, folder, 20, 60)
            wait_until(lambda: server.metric("sojourn_request_running") > 0, 40)
            time.sleep(2)
            below = descendants(process.pid)
            process.send_signal(signal.SIGINT)
            code = ended(process)
            found = statuses(folder / "run")
            left = living(below)
        outcome.check("Ctrl-C: exit code 130, records stay", code == 130 and bool(found), f"exit code {code}; {found}")
        outcome.check("Ctrl-C: no process stays", not left, f"{len(left)} left")


def impossible_rate(outcome: Outcome) -> None:
    with temporary_folder() as folder, serving("--max-waiting", "50") as server:
        code = ended(start(server.url, folder, 10_000, 1))
        text = (folder / "load.log").read_text(errors="replace")
    # 4 where the load was sent late, 5 where most of it was refused
    outcome.check("10,000 requests/s: the exit code is none of success", code in (4, 5) and "Traceback" not in text,
                  f"exit code {code}; {' '.join(text.split())[-140:]}")  # fmt: skip


def run(outcome: Outcome, arguments: argparse.Namespace) -> None:
    """The load generator and what can go wrong around it."""
    seconds = 2 if arguments.short else 4
    hostile_servers(outcome, ("resets", "vanishes") if arguments.short else WAYS, 2 * seconds)
    no_server(outcome)
    failing_machine(outcome, seconds)
    if not arguments.short:
        impossible_rate(outcome)


if __name__ == "__main__":
    main("load_generator", run)
