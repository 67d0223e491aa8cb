"""What Python's garbage collector does in a process that serves."""

import gc

# Allocations that are still alive, between two collections; Python's own 700 are those of a few tokens. What a request
# leaves goes without a collector, for it holds no cycles, so that a collection only walks through what is alive.
YOUNG = 10_000


def settle() -> None:
    """What loading left is no garbage: no collection walks through it from now on, and there are fewer of them. With
    cycles in every request and Python's own threshold, one kept all streams waiting for up to 25 ms."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 10, 10)
