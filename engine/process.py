"""A process that serves: its processor cores, how its threads wait, its garbage collector. No torch."""

import gc
import os
from collections.abc import Container, MutableMapping

import psutil

SPIN_COUNT = "300"  # a few microseconds: the gaps between the kernels of a step, and no more

# Allocations that are still alive, between two collections; Python's own 700 are those of a few tokens. What a request
# leaves goes without a collector, for it holds no cycles, so that a collection only walks through what is alive.
YOUNG = 10_000


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


def freeze_startup_objects() -> None:
    """What loading left is no garbage: no collection walks through it from now on, and there are fewer of them. With
    cycles in every request and Python's own threshold, one collection stopped all streams for up to 25 ms."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 10, 10)
