"""A process that serves: its processor cores, its memory, how its threads wait, its garbage collector. No torch."""

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Container, MutableMapping
from pathlib import Path

import psutil

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15  # linux/prctl.h
SPIN_COUNT = "300"  # a few microseconds: the gaps between the kernels of a step, and no more

# Allocations, less deallocations, between two collections; a few tokens reach Python's default of 700. The objects of a
# request hold no cycles and need no collector, so that a collection only walks through live objects.
YOUNG = 10_000


SWITCH_SECONDS = 0.0005


def share_interpreter() -> None:
    """Lets a thread that computes give up the interpreter ten times as often as by default.

    The event loop gives it up at each write to a socket and waits as long to get it back: with 32 streams and Python's
    default of 5 ms, a body that is checked in a thread delayed each step by 160 ms.
    """
    sys.setswitchinterval(SWITCH_SECONDS)


def let_threads_sleep(environment: MutableMapping[str, str], loaded: Container[str] = ()) -> None:
    """Keeps threads that wait for each other from spinning for long.

    Spinning takes cores from all other processes, and beside a busy process the wait itself takes ten times as long.
    libgomp reads the variable once, when torch loads it; so this does nothing where torch is in `loaded`. A value that
    the user has set stays.
    """
    if "torch" not in loaded:
        environment.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def keep_cupti(environment: MutableMapping[str, str]) -> None:
    """Lets torch's profiler measure CUDA graphs more than once: CUPTI, which times kernels, failed where it ended
    between two bursts and began again under replayed graphs. Read when the first burst begins. The user's values
    stay."""
    environment.setdefault("TEARDOWN_CUPTI", "0")
    environment.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")


def num_cores() -> int:
    """Physical cores that this process may use: a second thread on a core finds its vector units taken."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, psutil.cpu_count(logical=False) or usable)


def free_memory_bytes(cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Memory that this process may still take: of the machine, and of its container (cgroup v2) if that allows less."""
    free = psutil.virtual_memory().available
    try:
        group = cgroups / own.read_text().rpartition("::/")[2].strip()
    except OSError:
        return free
    for folder in (group, *group.parents):
        try:
            limit, used = (folder / "memory.max").read_text(), int((folder / "memory.current").read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if limit.strip() != "max":
            free = min(free, max(0, int(limit) - used + int(stat.get("inactive_file", 0))))
    return free


def freeze_startup_objects() -> None:
    """Takes the objects that exist now out of later collections, and makes collections rarer.

    With cycles in every request and Python's default, one collection stopped all streams for up to 25 ms.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 10, 10)


def end_with_parent(parent_pid: int) -> None:
    """Has Linux kill this process when its parent dies, however the parent dies. Raises SystemExit if it is dead."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        raise SystemExit(1)


def name_process(name: str) -> None:
    """The name that `ps` and `top` show: at most 15 characters. Linux only."""
    _prctl(PR_SET_NAME, ctypes.create_string_buffer(name.encode()))


def _prctl(option: int, value: int | ctypes.Array) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
