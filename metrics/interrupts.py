"""Ctrl-C reaches each process of a terminal's group. One of them answers."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker


@contextmanager
def own_interrupts() -> Iterator[None]:
    """Processes that are started meanwhile never see Ctrl-C, from their first moment on: whoever started
    them ends them. Here it waits until the block is left."""
    resource_tracker.ensure_running()  # its own start, with the first child, would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # children and threads inherit it
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
