"""How many threads a CPU computes a step with: all, or one where one is as fast."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

FEW_ROWS = (1, 2, 4)  # steps of so many tokens are tried
WORTH = 1.2  # times as fast all threads must be: they also take the cores of those who send and read
TRIALS = 3
TRIED_BYTES = 1 << 28  # of weights, in each trial
KV_SHARE = 0.25  # of the weights' bytes: where a step reads more keys and values than that, all threads attend


@dataclass(frozen=True, slots=True)
class StepThreads:
    """One thread for steps of up to `alone` tokens, for which reading the weights is all the work."""

    most: int
    alone: int = 0
    kv_tokens: int = 0  # that such a step may see in all

    def take(self, num_tokens: int, seen_tokens: int) -> None:
        """Sets this thread's number of threads for a step."""
        few = num_tokens <= self.alone and seen_tokens <= self.kv_tokens
        wanted = 1 if few else self.most
        if torch.get_num_threads() != wanted:
            torch.set_num_threads(wanted)


@torch.inference_mode()
def measured_threads(
    products: Sequence[Callable[[torch.Tensor], torch.Tensor]],
    inputs: Sequence[int],
    kv_tokens: int,
    most: int,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> StepThreads:
    """Tries the matrix products of one step, of `inputs` features each, with one thread and with `most` in turns.

    On a machine where one core draws nearly all of the memory's bandwidth the others only add their waking.
    """
    if most == 1:
        return StepThreads(1)
    alone = 0
    for rows in FEW_ROWS:
        operands = {size: torch.randn(rows, size) for size in set(inputs)}
        taken: dict[int, list[int]] = {1: [], most: []}
        for _ in range(TRIALS):
            for threads, times in taken.items():
                torch.set_num_threads(threads)
                begin_ns = clock()
                for product, size in zip(products, inputs, strict=True):
                    product(operands[size])
                times.append(clock() - begin_ns)
        torch.set_num_threads(most)
        if statistics.median(taken[1]) > WORTH * statistics.median(taken[most]):
            break
        alone = rows
    return StepThreads(most, alone, kv_tokens)
