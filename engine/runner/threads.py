"""The number of threads of a CPU step: all, or one where one is as fast."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.compute.linear import Linear
from engine.token.models.decoder import Decoder
from metrics.compute.cost_model import ModelShape

FEW_ROWS = (1, 2, 4)  # steps of so many tokens are tried
WORTH = 1.2  # times as fast must all threads be: they also take cores from the other processes
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
        """Sets the calling thread's number of threads for a step."""
        few = num_tokens <= self.alone and seen_tokens <= self.kv_tokens
        wanted = 1 if few else self.most
        if torch.get_num_threads() != wanted:
            torch.set_num_threads(wanted)


def step_threads(model: Decoder, shape: ModelShape) -> StepThreads:
    """Measured by the matrices of the first layers: more than a cache holds, and few, for the start waits for it."""
    linears, tried = [], 0
    for module in model.modules():
        if isinstance(module, Linear) and tried < TRIED_BYTES:
            linears.append(module)
            tried += module.packed_bytes
    kv_tokens = int(KV_SHARE * shape.weight_bytes / shape.kv_bytes_per_token)
    return measured_threads(linears, [linear.in_features for linear in linears], kv_tokens, torch.get_num_threads())


@torch.inference_mode()
def measured_threads(
    products: Sequence[Callable[[torch.Tensor], torch.Tensor]],
    inputs: Sequence[int],
    kv_tokens: int,
    most: int,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> StepThreads:
    """Tries the matrix products of one step, of `inputs` features each, with one thread and with `most` in turns.

    Where one core uses nearly all memory bandwidth, the others only add the time of their waking.
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
