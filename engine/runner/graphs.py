"""CUDA graphs: decode steps that the host launches as one, captured once for each size and replayed with new inputs."""

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from sojourn.engine.compute.attention.backend import AttentionBackend
from sojourn.engine.compute.attention.torch_backend import TorchAttention
from sojourn.engine.compute.operations.backend import Operations
from sojourn.engine.config import EngineConfig
from sojourn.engine.runner.batch import Batch
from sojourn.engine.runner.tables import StaticInputs, StepTensors
from sojourn.metrics.errors import ModelError

log = logging.getLogger(__name__)

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]


@dataclass(slots=True)
class Decoded:
    """The results of a decode step, in memory that does not move. Rows of padding hold no results."""

    logits: torch.Tensor  # [size, vocab_size]
    overflowed: torch.Tensor | None  # [size] bool: of hidden states that are no numbers; None where the ids tell
    ids: torch.Tensor  # [size] int64: sampled; the tables have them too
    hidden: torch.Tensor | None = None  # [size, hidden_size], where a technique wants it
    layer_outputs: list[torch.Tensor] = field(default_factory=list)  # likewise


Decode = Callable[[StepTensors, torch.Tensor], Decoded]  # a step, and its rows in the sampler's table


def graph_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, then by 8 up to 64, by 16 up to 256 and by 64 from there, up to `max_num_seqs`, which is the last.

    Each takes a moment to capture, and a larger batch notices the same padding less.
    """
    steps = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs, 64))
    sizes = [size for size in steps if size < max_num_seqs]
    return [*sizes, max_num_seqs]


class DecodeGraphs:
    """A graph for each size. A step is replayed by the smallest that holds it; the rest of its rows are padding.

    `capture` runs a decode step in memory from `static` and returns what replays it. On a GPU that is a CUDA graph; a
    CPU can only run it again, which is how everything here but the capture itself is tested.
    """

    def __init__(self, sizes: list[int], static: Callable[[int], StaticInputs], decode: Decode, capture: Capture):
        self.sizes = sorted(sizes)
        self._graphs: dict[int, tuple[StaticInputs, Replay, list[Decoded]]] = {}
        for size in reversed(self.sizes):  # the largest first: the others fit into its memory
            self._graphs[size] = self._captured(static(size), decode, capture)

    def size_for(self, batch: Batch) -> int | None:
        """The size of graph that can do this step; None where there is none."""
        sequences = len(batch.query_lens)
        if batch.has_drafts or not batch.all_sampled or batch.prompts is not None or sequences > self.sizes[-1]:
            return None
        return self.sizes[bisect_left(self.sizes, sequences)]

    def replay(self, size: int, batch: Batch) -> Decoded:
        """The results without rows of padding. The next replay overwrites them."""
        inputs, replay, results = self._graphs[size]
        fused = None if batch.sampling is None else batch.sampling.fused  # a rank that draws nothing
        inputs.load(batch.step, [] if fused is None else fused.table_rows)
        replay()
        decoded, count = results[-1], len(batch.query_lens)
        overflowed = None if decoded.overflowed is None else decoded.overflowed[:count]
        hidden = None if decoded.hidden is None else decoded.hidden[:count]
        layer_outputs = [output[:count] for output in decoded.layer_outputs]
        return Decoded(decoded.logits[:count], overflowed, decoded.ids[:count], hidden, layer_outputs)

    @staticmethod
    def _captured(inputs: StaticInputs, decode: Decode, capture: Capture) -> tuple[StaticInputs, Replay, list[Decoded]]:
        results: list[Decoded] = []

        def work() -> None:
            results[:] = [decode(inputs.tensors(), inputs.draw_rows)]

        return inputs, capture(work), results


def wants_graphs(
    config: EngineConfig, device: torch.device, attention: AttentionBackend, operations: Operations
) -> bool:
    """Whether decode steps are captured. Raises ModelError for graphs=on where they cannot be.

    A parallel group has graphs with graphs=on alone: its ranks must all have them, or none.
    The reference kernels read lengths and padding on the host: a graph would replay the values of its capture.
    """
    references = isinstance(attention, TorchAttention) or type(operations) is Operations
    if config.graphs == "on" and device.type == "cpu":
        raise ModelError("graphs=on needs a CUDA device, and this is a CPU; leave the choice to `auto`")
    if config.graphs == "on" and references:
        raise ModelError(
            "graphs=on cannot hold the reference kernels; leave attention_backend and fused_operations to `auto`"
        )
    wanted = config.graphs == "on" or (config.graphs == "auto" and config.num_ranks == 1)
    return device.type == "cuda" and wanted and not references


def captured(
    config: EngineConfig, sizes: list[int], static: Callable[[int], StaticInputs], decode: Decode, device: torch.device
) -> DecodeGraphs | None:
    """Graphs of these sizes. Where the capture fails, graphs=on raises ModelError and `auto` goes on without."""
    if not sizes:
        return None
    try:
        return DecodeGraphs(sizes, static, decode, CudaCapture(device, exchanges=config.num_ranks > 1))
    except Exception as error:  # torch raises RuntimeError, Triton many kinds
        if config.graphs == "on":
            raise ModelError(f"decode steps cannot be captured in CUDA graphs ({error}); use graphs=off") from error
        log.warning("decode steps are launched kernel by kernel, for CUDA graphs could not be captured: %s", error)
        torch.cuda.synchronize(device)
        return None


def graph_bytes(device: torch.device, sizes: list[int], capture: Callable[[list[int]], DecodeGraphs | None]) -> int:
    """Memory of graphs of all sizes: the largest has the memory that all share, each other one its launches."""
    used_bytes = [0, 0]
    for count in (1, 2) if sizes else ():
        torch.cuda.empty_cache()
        before = torch.cuda.mem_get_info(device)[0]
        graphs = capture(sizes[-count:])
        used_bytes[count - 1] = before - torch.cuda.mem_get_info(device)[0]
        del graphs
    return used_bytes[0] + max(0, used_bytes[1] - used_bytes[0]) * (len(sizes) - 1)


class CudaCapture:
    """Captures into CUDA graphs that share one pool of memory: they are replayed one after another."""

    WARM_UPS = 2  # kernels are compiled and libraries take their workspaces before anything is captured

    def __init__(self, device: torch.device, *, exchanges: bool = False):
        """`exchanges`: the work has NCCL's, whose watchdog asks for events in a thread of its own meanwhile."""
        self._errors = "thread_local" if exchanges else "global"
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], None]) -> Replay:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(self.WARM_UPS):
                work()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=self._errors):
            work()
        return graph.replay
