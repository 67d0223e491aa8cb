"""A CUDA device that computes nothing: torch.cuda pretends it, and FakeTensorMode gives tensors without data.

`install` changes torch for the whole process, so a dry run takes a process of its own.
"""

import contextlib
import subprocess
import sys
import tempfile
import types
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

ROOT = Path(__file__).parents[2]
MULTIPROCESSORS, TOTAL_BYTES = 132, 80 << 30  # of an H100
PINNED = "_dry_run_pinned"  # attribute of a host tensor that a device may copy without a wait


@dataclass(slots=True)
class Record:
    """What a dry run saw. `phase` is `start` until the engine serves, then `launch`, `collect` or `between`."""

    phase: str = "start"
    capturing: bool = False
    faults: Counter[str] = field(default_factory=Counter)
    counted: Counter[str] | None = None  # the launches of the step or graph that is counted now
    steps: dict[str, Counter[str]] = field(default_factory=dict)  # name of a step → its launches
    graphs: list[Counter[str]] = field(default_factory=list)  # launches of each graph, in the order of the captures
    specialisations: dict[str, dict] = field(default_factory=dict)  # of Triton kernels, as a compiler needs them

    def fault(self, text: str) -> None:
        self.faults[f"[{'capture' if self.capturing else self.phase}] {text} at {where()}"] += 1

    def launched(self, name: str) -> None:
        if self.counted is not None:
            self.counted[name] += 1


def where() -> str:
    """The two innermost lines of the project outside this folder. A virtual environment may lie in the project's."""
    frame, found, here = sys._getframe(1), [], str(Path(__file__).parent)
    while frame is not None and len(found) < 2:
        name = frame.f_code.co_filename
        if name.startswith(str(ROOT)) and not name.startswith(here) and "site-packages" not in name:
            found.append(f"{name[len(str(ROOT)) + 1 :]}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found) or "?"


def install(record: Record) -> FakeTensorMode:
    """Changes torch for this process, and returns the mode to compute in."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    _load_device_guard()
    _pretend_cuda(record)
    _pretend_tensors(record, mode)
    return mode


class Stream:
    """A stream on which nothing is ever queued."""

    cuda_stream = 0

    def __init__(self, *arguments: Any, **settings: Any) -> None: ...

    def wait_stream(self, other: "Stream") -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...


def _event_class(record: Record) -> type:
    class Event:
        clock_ms = 0.0

        def __init__(self, *arguments: Any, **settings: Any) -> None:
            self.at_ms: float | None = None

        def record(self, *arguments: Any) -> None:
            if record.capturing:
                record.fault("Event.record in a graph")
            Event.clock_ms += 0.01
            self.at_ms = Event.clock_ms

        def synchronize(self) -> None:
            if record.phase == "launch":
                record.fault("Event.synchronize while a step is launched")

        def query(self) -> bool:
            return True

        def elapsed_time(self, end: "Event") -> float:
            if self.at_ms is None or end.at_ms is None:
                raise RuntimeError("Both events must be recorded before calculating elapsed time.")
            return end.at_ms - self.at_ms

    return Event


def _pretend_cuda(record: Record) -> None:
    cuda = torch.cuda

    class Graph:
        def __init__(self) -> None:
            self.launches: Counter[str] = Counter()
            record.graphs.append(self.launches)

        def replay(self) -> None:
            record.launched("graph replay")

    @contextlib.contextmanager
    def capture(graph: Graph, **settings: Any) -> Iterator[None]:
        before, record.counted, record.capturing = record.counted, graph.launches, True
        try:
            yield
        finally:
            record.counted, record.capturing = before, False

    def synchronize(*arguments: Any) -> None:
        if record.phase == "launch":
            record.fault("torch.cuda.synchronize")

    device = types.SimpleNamespace(
        multi_processor_count=MULTIPROCESSORS, major=9, minor=0, total_memory=TOTAL_BYTES, name="dry run"
    )
    constants = {
        "is_available": True, "is_initialized": True, "_lazy_init": None, "device_count": 1, "current_device": 0,
        "get_device_name": "dry run of an H100", "get_device_capability": (9, 0), "get_device_properties": device,
        "empty_cache": None, "mem_get_info": (TOTAL_BYTES - (4 << 30), TOTAL_BYTES), "memory_allocated": 0,
        "max_memory_allocated": 0, "reset_peak_memory_stats": None, "graph_pool_handle": (0, 0),
    }  # fmt: skip
    for name, value in constants.items():
        setattr(cuda, name, lambda *arguments, value=value: value)
    cuda.is_current_stream_capturing = lambda: record.capturing
    cuda.synchronize, cuda.CUDAGraph, cuda.graph = synchronize, Graph, capture
    cuda.Stream, cuda.Event = Stream, _event_class(record)
    cuda.current_stream = Stream
    cuda.stream = lambda stream: contextlib.nullcontext()
    fake_tensor.init_gpu_context = lambda *arguments: None


def _pretend_tensors(record: Record, mode: FakeTensorMode) -> None:
    """Pinned memory, tensors made of the host's numbers, and reads of results."""

    def pinned(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, FakeTensor):
            tensor = mode.from_tensor(tensor)
        tensor = tensor.view(tensor.shape) if getattr(tensor, PINNED, False) else tensor.clone()
        setattr(tensor, PINNED, True)
        return tensor

    torch.Tensor.pin_memory = lambda self, *arguments: pinned(self)
    make_tensor = torch.tensor
    for name in ("empty", "tensor", "zeros"):

        def made(*arguments: Any, make=getattr(torch, name), pin_memory: bool = False, **settings: Any) -> torch.Tensor:
            if make is make_tensor and torch.device(settings.get("device") or "cpu").type == "cuda":
                device = settings.pop("device")  # numbers of the host: made there, and sent
                return make(*arguments, **settings).to(device)
            tensor = make(*arguments, **settings)
            return pinned(tensor) if pin_memory else tensor

        setattr(torch, name, made)
    from_numpy = torch.from_numpy
    torch.from_numpy = lambda array: mode.from_tensor(from_numpy(array))
    plain_tolist = torch.Tensor.tolist

    def tolist(self: torch.Tensor) -> Any:
        if not isinstance(self, FakeTensor):
            return plain_tolist(self)
        if self.device.type == "cuda":
            record.fault("tolist of a CUDA tensor makes the host wait")

        def zeros(shape: tuple[int, ...]) -> Any:
            return [zeros(shape[1:]) for _ in range(shape[0])] if shape else 0

        return zeros(tuple(self.shape))

    torch.Tensor.tolist = FakeTensor.tolist = tolist
    torch.nn.Module.to_empty = _to_empty
    generator = torch.Generator
    torch.Generator = lambda *arguments, **settings: generator()


def _to_empty(self: torch.nn.Module, *, device: torch.device, recurse: bool = True) -> torch.nn.Module:
    """torch.nn.Module.to_empty; torch's own swaps tensors, which fakes do not allow."""
    for module in self.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                made = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                module._parameters[name] = torch.nn.Parameter(made, requires_grad=False)
    return self


GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace { C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>); }
"""


def _load_device_guard() -> None:
    """Indexing asks for a guard of CUDA devices, and torch for CPUs has none: compiles one that does nothing."""
    if torch.backends.cuda.is_built():
        return
    folder = Path(tempfile.gettempdir()) / f"sojourn-dry-run-{torch.__version__}"
    library = folder / "guard.so"
    if not library.exists():
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            source, built = Path(work) / "guard.cpp", Path(work) / "guard.so"
            source.write_text(GUARD)
            include = Path(torch.__file__).parent / "include"
            subprocess.run(
                ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", "-DNDEBUG", f"-I{include}", str(source),
                 f"-L{include.parent / 'lib'}", "-lc10", "-o", str(built)],
                check=True,
            )  # fmt: skip
            built.replace(library)  # whole or not at all, whoever else builds it
    torch.ops.load_library(str(library))
