"""Ctrl-C at any moment ends a verb with 130 and without a traceback: sent to the process group, as a terminal does."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sojourn.commands.stopped import NOTHING_KEPT
from tests.metrics.synthetic import synthetic_run

ROOT = Path(__file__).parents[2]
PROGRAM = "from sojourn import main; main()"  # as the console script
DEAD = "http://127.0.0.1:9"
WORKERS = """
import multiprocessing, signal, sys, time
from sojourn.metrics.interrupts import own_interrupts
with own_interrupts():
    workers = multiprocessing.get_context("spawn").Pool(2)
    assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []), "what is started now would see Ctrl-C"
try:
    print("import time: workers", file=sys.stderr, flush=True)
    workers.map(time.sleep, [60, 60])
except KeyboardInterrupt:
    workers.terminate()
    sys.exit(130)
"""

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return synthetic_run(tmp_path_factory.mktemp("runs") / "a", plant="small_batch_cap", requests=20).path


def interrupted(
    folder: Path, code: str, arguments: list[str], moment: str, stdout: Path = Path(os.devnull)
) -> tuple[int, str]:
    """Exit code and stderr. `moment`: the module whose import has just ended, or "" for the start of the process."""
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-c", code, *arguments], cwd=folder, stdout=stdout.open("w"),
        stderr=subprocess.PIPE, text=True, start_new_session=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    said = []
    for line in process.stderr if moment else ():
        said.append(line)
        if line.split()[-1:] == [moment]:
            break
    os.killpg(process.pid, signal.SIGINT)
    said.append(process.communicate(timeout=60)[1])
    return process.returncode, "".join(line for line in "".join(said).splitlines(True) if "import time:" not in line)


@pytest.mark.parametrize(
    ("verb", "moment"),
    [
        ("diagnose", "sojourn.commands"), ("diagnose", "typer"), ("diagnose", "sojourn.commands.summary"),
        ("diagnose", "pyarrow.lib"), ("diagnose", "pandas._libs"), ("diagnose", "sojourn.replay.predictor"),
        ("load", "sojourn.commands.summary"), ("load", "pydantic"), ("--version", "sojourn.metrics.version"),
        ("capacity", "numpy"), ("watch", "sojourn.live.watch.watcher"),
    ],
)  # fmt: skip
def test_ctrl_c_at_any_moment_ends_with_130_in_silence(tmp_path, run, verb, moment):
    lines = {
        "diagnose": ["diagnose", str(run)], "load": ["load", "demo", "--base-url", DEAD], "--version": ["--version"],
        "capacity": ["capacity", "steady-chat", "--base-url", DEAD], "watch": ["watch", DEAD, "--once"],
    }  # fmt: skip
    code, said = interrupted(tmp_path, PROGRAM, lines[verb], moment)
    assert code == 130 and said == "", said


@pytest.mark.parametrize(("verb", "told"), [("load", True), ("run", True), ("diagnose", False)])
@pytest.mark.parametrize("moment", ["typer", "pydantic"])
def test_a_load_that_is_stopped_in_its_first_second_says_that_nothing_is_kept(tmp_path, run, verb, told, moment):
    lines = {"diagnose": ["diagnose", str(run)], "load": ["load", "demo", DEAD], "run": ["run", "demo"]}
    code, _ = interrupted(tmp_path, PROGRAM, lines[verb], moment, said_to := tmp_path / "said")
    assert code == 130 and said_to.read_text().strip().split("\n")[-1:] == ([NOTHING_KEPT] if told else [""])


def test_ctrl_c_before_the_first_line_is_silent(tmp_path):
    """The system ends a process that has no handler yet; a shell shows that as 130."""
    code, said = interrupted(tmp_path, PROGRAM, ["diagnose", "x"], "")
    assert code in (130, -signal.SIGINT) and said == "", said


def test_ctrl_c_is_not_of_the_processes_that_compute_for_a_verb(tmp_path):
    code, said = interrupted(tmp_path, WORKERS, [], "workers")
    assert code == 130 and "Traceback" not in said, said
