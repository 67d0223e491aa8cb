"""The processor cores that the engine may use, and how its threads wait on them. Knows no torch."""

import os
from collections.abc import Container, MutableMapping

import psutil

SPIN_COUNT = "300"  # a few microseconds: the gaps between the kernels of a step, and no more


def let_threads_sleep(environment: MutableMapping[str, str], loaded: Container[str] = ()) -> None:
    """Keeps threads that wait for each other from spinning for long, which takes their cores from everybody else and,
    beside a busy process, ten times as long. libgomp asks once, when torch brings it in: where torch is in `loaded`, it
    is too late. What a user has set stands."""
    if "torch" not in loaded:
        environment.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def num_cores() -> int:
    """Physical cores that this process may use: a second thread on a core finds its vector units taken."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, psutil.cpu_count(logical=False) or usable)
