"""Decode steps that the host launches as one: captured once for each size, replayed with other numbers."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.runner.batch import Batch
from engine.runner.tables import StaticInputs, StepTensors

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]


@dataclass(slots=True)
class Decoded:
    """What a decode step leaves in memory that stays where it is. The rows of padding hold nothing that counts."""

    logits: torch.Tensor  # [size, vocab_size] float32
    overflowed: torch.Tensor  # [size] bool
    ids: torch.Tensor  # [size] int64: drawn, and remembered by the tables


Decode = Callable[[StepTensors, torch.Tensor], Decoded]  # a step, and its rows in the sampler's table


def graph_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, then by 8 up to 256 and by 64 from there, up to `max_num_seqs`, which is the last.

    Each takes a moment to capture, and a larger batch notices the same padding less.
    """
    steps = (1, 2, 4, *range(8, 256, 8), *range(256, max_num_seqs, 64))
    sizes = [size for size in steps if size < max_num_seqs]
    return [*sizes, max_num_seqs]


class DecodeGraphs:
    """A graph for each size. A step is replayed by the smallest that holds it; the rest of its rows are padding.

    `capture` runs a decode step in memory from `static` and returns what replays it. On a GPU that is a CUDA graph; a
    CPU can only run it again, which is how everything here but the capture itself is tested.
    """

    def __init__(
        self,
        sizes: list[int],
        static: Callable[[int], StaticInputs],
        decode: Decode,
        capture: Capture,
    ):
        self.sizes = sorted(sizes)
        self._graphs: dict[int, tuple[StaticInputs, Replay, list[Decoded]]] = {}
        for size in reversed(self.sizes):  # the largest first: the others fit into its memory
            self._graphs[size] = self._captured(static(size), decode, capture)

    def size_for(self, batch: Batch) -> int | None:
        """The size of graph that can do this step; None where there is none."""
        sequences = len(batch.query_lens)
        if not batch.all_draw or batch.prompts is not None or sequences > self.sizes[-1]:
            return None
        return self.sizes[bisect_left(self.sizes, sequences)]

    def replay(self, size: int, batch: Batch) -> Decoded:
        """Rows of padding left out. The next replay writes over it."""
        inputs, replay, results = self._graphs[size]
        fused = batch.sampling.fused
        inputs.load(batch.step, [] if fused is None else fused.table_rows)
        replay()
        decoded, count = results[-1], len(batch.query_lens)
        return Decoded(decoded.logits[:count], decoded.overflowed[:count], decoded.ids[:count])

    @staticmethod
    def _captured(inputs: StaticInputs, decode: Decode, capture: Capture) -> tuple[StaticInputs, Replay, list[Decoded]]:
        results: list[Decoded] = []

        def work() -> None:
            results[:] = [decode(inputs.tensors(), inputs.draw_rows)]

        return inputs, capture(work), results


def run_again(work: Callable[[], None]) -> Replay:
    """The capture of a device without graphs."""
    work()
    return work
