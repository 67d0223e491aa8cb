"""Which processes have the CPUs: those of a kernel in a folder, and of this machine."""

import os
import subprocess
import sys
import time

import pytest

from sojourn.metrics.machine.neighbours import Neighbours

S = 1_000_000_000
HERTZ = os.sysconf("SC_CLK_TCK")


def write(proc, pid: int, name: str, seconds: float) -> None:
    (proc / str(pid)).mkdir(exist_ok=True)
    ticks = int(seconds * HERTZ)
    (proc / str(pid) / "stat").write_text(f"{pid} ({name}) S 1 1 1 0 -1 4194560 1 2 3 4 {ticks} 0 0 0 20 0 1 0 5\n")


@pytest.fixture
def proc(tmp_path):
    (tmp_path / "self").mkdir()
    for pid, name in ((7, "ours"), (8, "stress"), (9, "a (b) c"), (10, "idle"), (11, "other"), (12, "more")):
        write(tmp_path, pid, name, 10.0)
    return tmp_path


def test_the_busiest_since_the_call_before_are_named_most_first(proc):
    found = Neighbours(proc)
    assert found.busiest(0, 1.5, {7}) == []  # nothing to compare with
    for pid, name, seconds in ((7, "ours", 12.0), (8, "stress", 11.8), (9, "a (b) c", 10.4), (11, "other", 10.2)):
        write(proc, pid, name, seconds)
    write(proc, 12, "more", 10.02)
    write(proc, 13, "new", 1.0)
    shown = found.busiest(2 * S, 1.5, {7})
    assert [name for name, _ in shown] == ["stress (8)", "new (13)", "a (b) c (9)"]
    assert [cores for _, cores in shown] == pytest.approx([0.9, 0.5, 0.2], abs=0.02)


def test_a_quiet_machine_is_not_read(proc):
    found = Neighbours(proc)
    found.busiest(0, 1.0, ())
    write(proc, 8, "stress", 11.0)
    assert found.busiest(S, 0.2, ()) == [] and found.busiest(2 * S, None, ()) == []
    assert found.busiest(3 * S, 1.0, ()) == []  # of a time before nobody knows who had it
    write(proc, 8, "stress", 11.5)
    assert found.busiest(4 * S, 1.0, ()) == [("stress (8)", pytest.approx(0.5, abs=0.02))]


def test_a_process_that_ends_meanwhile_costs_nothing(proc):
    found = Neighbours(proc)
    found.busiest(0, 1.0, ())
    (proc / "8" / "stat").unlink()
    write(proc, 9, "a (b) c", 10.5)
    assert [name for name, _ in found.busiest(S, 1.0, ())] == ["a (b) c (9)"]


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["/usr/bin/python", "-m", "pytest", "--token", "secret"], "python -m pytest"),
        (["python", "-u", "/home/me/train.py", "secret"], "python train.py"),
        (["/usr/bin/python", "/opt/env/bin/vllm", "serve", "secret"], "python vllm"),
        (["python", "-c", "password = 1"], "python"),
        (["python"], "python"),
    ],
)
def test_the_program_of_an_interpreter_is_named_and_no_other_word(proc, words, name):
    found = Neighbours(proc)
    write(proc, 20, "python", 1.0)
    (proc / "20" / "cmdline").write_text("\0".join(words) + "\0")
    found.busiest(0, 1.0, ())
    write(proc, 20, "python", 2.0)
    assert found.busiest(S, 1.0, ()) == [(f"{name} (20)", pytest.approx(1.0, abs=0.02))]


def test_a_process_that_computes_on_this_machine_is_named():
    found = Neighbours()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            found.busiest(time.monotonic_ns(), 1.0, {os.getpid()})
            deadline, shown = time.monotonic() + 20, []
            while not any(f"({busy.pid})" in name for name, _ in shown) and time.monotonic() < deadline:
                time.sleep(0.3)
                shown = found.busiest(time.monotonic_ns(), 1.0, {os.getpid()})
        finally:
            busy.kill()
    assert any(f"({busy.pid})" in name for name, _ in shown), shown
