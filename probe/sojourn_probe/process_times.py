"""What the kernel of a Linux machine counts of this process and of its CPUs (/proc), as a record of the stream."""

import os
import time
from pathlib import Path

from sojourn_probe.records import Sample

PROC = Path("/proc")
_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_AT_REST = (3, 4, 7)  # columns of /proc/stat: idle, iowait, and steal, which other machines had
_STEAL = 7


def sample(with_workers: bool, proc: Path = PROC) -> Sample | None:
    """One reading of this process, or of it with the workers that it has started. None where the kernel does not count.

    A core has workers. A front has started the core, which reads itself, so a front is read alone.
    """
    own = os.getpid()
    try:
        loop_cpu_ns, loop_queued_ns = _of_thread(proc / str(own) / "task" / str(own))
        busy_ns, steal_ns, whole_ns = _machine(proc)
        found = Sample(
            time.monotonic_ns(), 0, 0, 0, loop_cpu_ns, loop_queued_ns, _switches(proc / str(own)), busy_ns, steal_ns,
            whole_ns,
        )  # fmt: skip
    except (OSError, ValueError, KeyError, IndexError):
        return None
    for pid in (own, *(_children(proc / str(own)) if with_workers else ())):
        try:
            cpu_ns, queued_ns, rss_bytes = _of_process(proc / str(pid))
        except (OSError, ValueError, IndexError):  # a worker that ended meanwhile
            continue
        found.cpu_ns += cpu_ns
        found.queued_ns += queued_ns
        found.rss_bytes += rss_bytes
    return found


def _of_process(folder: Path) -> tuple[int, int, int]:
    """Time on CPUs, time in the run queue of the threads that live, resident bytes."""
    fields = (folder / "stat").read_text(encoding="utf-8", errors="replace").rsplit(")", 1)[1].split()
    user_and_system = int(fields[11]) + int(fields[12])
    queued_ns = 0
    for task in (folder / "task").iterdir():
        try:
            queued_ns += _of_thread(task)[1]
        except OSError:  # it ended meanwhile
            continue
    return user_and_system * _TICK_NS, queued_ns, int(fields[21]) * _PAGE_BYTES


def _of_thread(task: Path) -> tuple[int, int]:
    """Time on a CPU, and time in which it could run and had none (Documentation/scheduler/sched-stats.rst)."""
    cpu_ns, queued_ns, _ = (task / "schedstat").read_text(encoding="ascii").split()
    return int(cpu_ns), int(queued_ns)


def _switches(folder: Path) -> int:
    """Of the main thread: another thread got its core."""
    lines = (folder / "status").read_text(encoding="utf-8", errors="replace").splitlines()
    return int(dict(line.split(":", 1) for line in lines)["nonvoluntary_ctxt_switches"])


def _machine(proc: Path) -> tuple[int, int, int]:
    """Of all CPUs since the start: busy, taken by other machines, and all time."""
    with (proc / "stat").open(encoding="ascii") as file:
        ticks = [int(count) for count in file.readline().split()[1:9]]
    whole = sum(ticks)
    return (whole - sum(ticks[column] for column in _AT_REST)) * _TICK_NS, ticks[_STEAL] * _TICK_NS, whole * _TICK_NS


def _children(folder: Path) -> list[int]:
    found: list[int] = []
    for task in (folder / "task").iterdir():
        try:
            found += map(int, (task / "children").read_text(encoding="ascii").split())
        except OSError:
            continue
    return found
