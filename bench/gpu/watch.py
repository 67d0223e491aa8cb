"""Looks at every torch operation and every Triton launch of a dry run: what waits, mixes devices, or is launched.

The list of operations that wait is that of torch's documentation; a copy waits unless it is asynchronous and its host
side is pinned.
"""

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.gpu.fake_device import PINNED, Record, where

VIEWS = {"view", "_unsafe_view", "reshape", "unbind", "split", "split_with_sizes", "slice", "select", "t", "transpose",
         "expand", "unsqueeze", "squeeze", "as_strided", "detach", "alias", "permute", "unfold", "chunk", "narrow",
         "diagonal", "lift_fresh", "_reshape_alias", "view_as"}  # fmt: skip
ALLOCATIONS = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive", "bincount",
         "equal", "is_nonzero", "item", "histc", "allclose"}  # fmt: skip
RANDOM = {"rand", "randn", "randint", "bernoulli", "multinomial", "normal_", "uniform_", "exponential_", "random_"}
COPIES = {"_to_copy", "copy_", "copy"}
TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "i1",
    torch.float8_e4m3fn: "fp8e4nv", torch.uint64: "u64", torch.uint32: "u32",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
MOST_BLOCKS = (2**31 - 1, 65_535, 65_535)  # of a grid, in each direction


class OperationWatch(TorchDispatchMode):
    """Stands above the fake mode."""

    def __init__(self, record: Record):
        super().__init__()
        self._record = record

    def __torch_dispatch__(self, func: Any, kinds: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:  # in inference mode nobody has taken it apart yet
                return func.decompose(*args, **kwargs)
        given = [*_tensors(args), *_tensors(kwargs)]
        if name == "bincount" and not any(map(_on_cuda, given)):  # its shape depends on data that no fake has
            return torch.zeros(kwargs.get("minlength", args[2] if len(args) > 2 else 1), dtype=torch.int64)
        result = func(*args, **kwargs)
        made = [*_tensors(result)]
        for tensor in made:  # else torch computes with the numbers that the host gave
            if isinstance(tensor, FakeTensor):
                tensor.constant = None
        if any(map(_on_cuda, [*given, *made])):
            self._look(func, name, args, kwargs, given, made)
        return result

    def _look(self, func: Any, name: str, args: tuple, kwargs: dict, given: list, made: list) -> None:
        if name in COPIES and {t.device.type for t in [*given, *made]} == {"cuda", "cpu"}:
            self._look_at_copy(name, args, kwargs, given, made)
            return
        self._look_at_devices(name, args, kwargs, given)
        if self._record.capturing and name in RANDOM:
            self._record.fault(f"{name} draws random numbers in a graph")
        if name not in VIEWS and name not in ALLOCATIONS and not func.is_view:
            self._record.launched(f"aten.{name}")

    def _look_at_devices(self, name: str, args: tuple, kwargs: dict, given: list) -> None:
        record, cuda = self._record, any(map(_on_cuda, given))
        if cuda and any(tensor.dim() for tensor in given if not _on_cuda(tensor)):
            what = "indexes a CUDA tensor by one of the host" if name.startswith("index") else "mixes devices"
            record.fault(f"{name} {what}: {[(str(t.device), tuple(t.shape)) for t in given]}")
        by_mask = name.startswith("index") and any(t.dtype in (torch.bool, torch.uint8) for t in _tensors(args[1:2]))
        counts = name == "repeat_interleave" and kwargs.get("output_size") is None and len(given) == 1
        if cuda and (name in WAITS or counts or by_mask):
            record.fault(f"{name}{' by a mask' if by_mask else ''} makes the host wait")

    def _look_at_copy(self, name: str, args: tuple, kwargs: dict, given: list, made: list) -> None:
        target, source = (given[0], given[1]) if name == "copy_" else (made[0], given[0])
        non_blocking = kwargs.get("non_blocking", False) or (name == "copy_" and len(args) > 2 and args[2])
        down = _on_cuda(source)
        host = target if down else source
        side = "to" if down else "from"
        self._record.launched(f"copy {side} the host")
        if self._record.capturing:
            self._record.fault(f"{name} copies {side} the host in a graph")
        if not non_blocking:
            self._record.fault(f"{name} copies {side} the host, and waits")
        elif not getattr(host, PINNED, False) and (down or host.dim()):
            self._record.fault(f"{name} copies {side} pageable memory, and waits")


def watch_triton(record: Record) -> None:
    """Notes every launch of a Triton kernel instead of doing it."""
    from triton.runtime.jit import JITFunction

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **settings: Any) -> None:
        options = {name: settings.pop(name) for name in OPTIONS if name in settings and name not in self.arg_names}
        given = dict(zip(self.arg_names, arguments, strict=False)) | settings
        missing = [p.name for p in self.params if p.name not in given and not p.has_default]
        if missing or set(given) - set(self.arg_names):
            raise TypeError(f"{self.__name__}: missing {missing}, unknown {set(given) - set(self.arg_names)}")
        size = grid(given) if callable(grid) else grid
        if any(not 0 < count <= most for count, most in zip(size, MOST_BLOCKS, strict=False)):
            record.fault(f"Triton kernel {self.__name__}: grid {size}")
        kind = {"kernel": f"{self.fn.__module__}:{self.__name__}", **_specialised(self, given, record), **options}
        key = json.dumps(kind, default=str, sort_keys=True)
        if key not in record.specialisations:
            phase = "capture" if record.capturing else record.phase
            record.specialisations[key] = kind | {"phase": phase, "first": where()}
            if record.capturing:
                record.fault(f"Triton kernel {self.__name__} is compiled in a capture")
        record.launched(f"triton.{self.__name__}")

    JITFunction.run = run


def _specialised(kernel: Any, given: dict[str, Any], record: Record) -> dict[str, dict]:
    """`signature` and `constants` as bench.gpu.compilation.Compilation has them: what Triton compiles a kernel for."""
    signature, constants = {}, {}
    for parameter in kernel.params:
        name, value = parameter.name, given.get(parameter.name)
        whole = parameter.do_not_specialize
        aligned = not whole and not parameter.do_not_specialize_on_alignment
        if parameter.is_constexpr or value is None:
            constants[name] = value
        elif isinstance(value, torch.Tensor):
            if not _on_cuda(value):
                record.fault(f"Triton kernel {kernel.__name__}: {name} is on {value.device}")
            place = value.storage_offset() * value.itemsize
            signature[name] = f"*{TYPES[value.dtype]}" + (":16" if aligned and place % 16 == 0 else "")
        elif isinstance(value, bool):
            signature[name] = "u1"
        elif isinstance(value, int) and value == 1 and not whole:
            constants[name] = 1
        elif isinstance(value, int):
            width = "i32" if -(2**31) <= value < 2**31 else "i64" if value < 2**63 else "u64"
            signature[name] = width + (":16" if aligned and value % 16 == 0 else "")
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            raise TypeError(f"{kernel.__name__}: argument {name} is a {type(value)}")
    return {"signature": signature, "constants": constants}


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))


def _on_cuda(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda"
