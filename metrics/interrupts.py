"""Ctrl-C reaches each process of a terminal's group. One of them answers."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def own_interrupts() -> Iterator[None]:
    """Processes that are started meanwhile never see Ctrl-C, from their first moment on: whoever started
    them ends them. Here it waits until the block is left."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # children and threads inherit it
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
