"""Processes that share work: Ctrl-C reaches each process of a terminal's group, and one of them answers."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import ModuleType


@contextmanager
def own_interrupts() -> Iterator[None]:
    """Processes that are started meanwhile never see Ctrl-C, from their first moment on: whoever started
    them ends them. Here it waits until the block is left. Nor do they run the program again that started them, which
    may be a page of the app, or a script without a guard."""
    resource_tracker.ensure_running()  # its own start, with the first child, would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # children and threads inherit it
    program, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = program
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
