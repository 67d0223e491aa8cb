"""CUDA graphs: whether they can be had, how they are captured, and what memory they take."""

import logging
from collections.abc import Callable

import torch

from engine.compute.attention import AttentionBackend
from engine.compute.attention_torch import TorchAttention
from engine.compute.operations import Operations, TorchOperations
from engine.config import EngineConfig
from engine.runner.graphs import Decode, DecodeGraphs, Replay
from engine.runner.tables import StaticInputs
from metrics.errors import ModelError

log = logging.getLogger(__name__)


def wants_graphs(
    config: EngineConfig, device: torch.device, attention: AttentionBackend, operations: Operations
) -> bool:
    """Raises ModelError where graphs are asked for and cannot be.

    The reference kernels ask the host for lengths and for padding: a graph would go on with the answers that they got
    when it was captured.
    """
    references = isinstance(attention, TorchAttention) or isinstance(operations, TorchOperations)
    if config.graphs == "on" and device.type == "cpu":
        raise ModelError("graphs=on needs a CUDA device, and this is a CPU; leave the choice to `auto`")
    if config.graphs == "on" and references:
        raise ModelError(
            "graphs=on cannot hold the reference kernels; leave attention_backend and fused_operations to `auto`"
        )
    return device.type == "cuda" and config.graphs != "off" and not references


def captured(
    config: EngineConfig, sizes: list[int], static: Callable[[int], StaticInputs], decode: Decode, device: torch.device
) -> DecodeGraphs | None:
    """Graphs of these sizes, if any. Where they fail, graphs=on raises ModelError and `auto` goes on without."""
    if not sizes:
        return None
    try:
        return DecodeGraphs(sizes, static, decode, CudaCapture(device))
    except Exception as error:  # torch raises RuntimeError, Triton whatever kept a kernel from being built
        if config.graphs == "on":
            raise ModelError(f"decode steps cannot be captured in CUDA graphs ({error}); use graphs=off") from error
        log.warning("decode steps are launched kernel by kernel, for CUDA graphs could not be captured: %s", error)
        torch.cuda.synchronize(device)
        return None


def graph_bytes(device: torch.device, sizes: list[int], capture: Callable[[list[int]], DecodeGraphs | None]) -> int:
    """What graphs of all sizes will take: the largest has the memory that all share, the others their launches."""
    taken = [0, 0]
    for count in (1, 2) if sizes else ():
        torch.cuda.empty_cache()
        before = torch.cuda.mem_get_info(device)[0]
        graphs = capture(sizes[-count:])
        taken[count - 1] = before - torch.cuda.mem_get_info(device)[0]
        del graphs
    return taken[0] + max(0, taken[1] - taken[0]) * (len(sizes) - 1)


class CudaCapture:
    """Captures into CUDA graphs that share one pool of memory: they are replayed one after another."""

    WARM_UPS = 2  # kernels are compiled and libraries take their workspaces before anything is captured

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], None]) -> Replay:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(self.WARM_UPS):
                work()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            work()
        return graph.replay
