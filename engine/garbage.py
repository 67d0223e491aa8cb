"""What Python's garbage collector does in a process that serves."""

import gc

# Allocations that are still alive, between two collections. Python's own 700 are those of a few tokens: with 32 streams
# a collection of the second generation then held up all streams for 4 ms about every 200 steps.
YOUNG = 20_000


def settle() -> None:
    """What loading left is no garbage, and no collection walks through it; they become rarer, and so cheaper in all:
    each looks at what is alive, most of what is not needs none."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 10, 10)
