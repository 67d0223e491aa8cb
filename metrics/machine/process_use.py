"""What one process got of the CPUs: time on them, time in the run queue of the kernel, and switches away from them.

Linux counts both times for each thread (/proc/PID/task/TID/schedstat, in nanoseconds: Documentation/scheduler/
sched-stats.rst). A thread that could run and had to wait for a core is in the run queue; a thread that sleeps is in
neither. So wall time minus both is what a thread spent blocked: in a lock, on a socket, on the disk, in a sleep.
"""

from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")


class ThreadTimes(NamedTuple):
    """Of one thread, nanoseconds since it began."""

    cpu_ns: int
    queued_ns: int  # it could run, and no core was free


class ProcessUse(NamedTuple):
    """Of one process, since it began. The main thread is the one that runs an event loop or an engine's loop."""

    queued_ns: int  # of all threads that live
    main: ThreadTimes
    voluntary_switches: int  # of the main thread: it had nothing to do
    involuntary_switches: int  # of the main thread: another thread got its core


def process_use(pid: int, proc: Path = PROC) -> ProcessUse | None:
    """None where the kernel does not count, or the process is gone."""
    try:
        threads = {task.name: _thread_times(task) for task in (proc / str(pid) / "task").iterdir()}
        main = threads[str(pid)]
        if main is None:
            return None
        switches = _switches(proc / str(pid) / "status")
    except (OSError, KeyError, ValueError):
        return None
    return ProcessUse(sum(each.queued_ns for each in threads.values() if each is not None), main, *switches)


def children_of(pid: int, proc: Path = PROC) -> list[int]:
    """Processes that its threads have started and that live; [] where the kernel does not tell."""
    found: list[int] = []
    try:
        for task in (proc / str(pid) / "task").iterdir():
            found += map(int, (task / "children").read_text(encoding="ascii").split())
    except (OSError, ValueError):  # a thread or the process ended meanwhile
        pass
    return found


def cpu_pressure_ns(proc: Path = PROC) -> int | None:
    """Time since the start in which some thread of this machine waited for a core (pressure stall information)."""
    try:
        first = (proc / "pressure" / "cpu").read_text(encoding="ascii").splitlines()[0]
        return 1000 * int(first.rsplit("total=", 1)[1])
    except (OSError, IndexError, ValueError):
        return None


def _thread_times(task: Path) -> ThreadTimes | None:
    """None for a thread that ended meanwhile."""
    try:
        cpu_ns, queued_ns, _ = (task / "schedstat").read_text(encoding="ascii").split()
    except FileNotFoundError:
        return None
    return ThreadTimes(int(cpu_ns), int(queued_ns))


def _switches(status: Path) -> tuple[int, int]:
    """Voluntary, involuntary."""
    named = dict(line.split(":", 1) for line in status.read_text(encoding="utf-8", errors="replace").splitlines())
    return int(named["voluntary_ctxt_switches"]), int(named["nonvoluntary_ctxt_switches"])
