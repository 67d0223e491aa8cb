"""The small operations of a layer, fused for a CPU: `cpp/operations.cpp` does the work."""

import ctypes

import torch

from sojourn.engine.compute.buffers import Workspace
from sojourn.engine.compute.cpp.extension import Library
from sojourn.engine.compute.kv_cache import LayerCache
from sojourn.engine.compute.kv_formats import cpp_format
from sojourn.engine.compute.operations.backend import Gate, HeadSpec, Norm, Operations, Rope
from sojourn.engine.compute.operations.reference import (
    clamped_swish_gate,
    gelu_gate,
    gemma_rms_norm,
    rms_norm,
    silu_gate,
)

POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
SHIFTS = {rms_norm: 0.0, gemma_rms_norm: 1.0}  # of the weight, by the kind of norm
GATES = {  # their kernels
    silu_gate: "sojourn_silu_gate", gelu_gate: "sojourn_gelu_gate", clamped_swish_gate: "sojourn_clamped_swish_gate",
}  # fmt: skip


class SlotArguments(ctypes.Structure):
    """`struct Slots` of kernels.h."""

    _fields_ = tuple((name, INT) for name in ("block_size", "block_stride", "token_stride", "head_stride"))

    def place(self, cache: LayerCache) -> None:
        """Fills in the order of its vectors."""
        _, _, self.block_size, num_kv_heads, _ = cache.values.shape
        self.block_stride = self.block_size * num_kv_heads
        self.token_stride, self.head_stride = cache.strides()


class HeadArguments(ctypes.Structure):
    """`struct Heads` of kernels.h."""

    _fields_ = (
        *((name, POINTER) for name in ("qkv", "query", "keys", "values", "key_scales", "value_scales")),
        *((name, POINTER) for name in ("slots", "positions")),
        *((name, POINTER) for name in ("q_norm", "k_norm", "cos", "sin")),
        *((name, INT) for name in ("num_tokens", "num_heads", "num_kv_heads", "head_dim")),
        ("places", SlotArguments),
        ("kv_format", INT),
        ("eps", FLOAT),
        ("norm_shift", FLOAT),
    )

    def place_cache(self, cache: LayerCache) -> None:
        """Fills in where the vectors of a layer go, and in which format."""
        self.keys, self.values, self.key_scales, self.value_scales = cache.addresses()
        self.places.place(cache)
        self.kv_format = cpp_format(cache.values.dtype)


class CppOperations(Operations):
    """float32, but for what is written to a quantised cache. Operations without a kernel are those of the reference.

    The gates' exponential is within 2 units in the last place. A row's results do not depend on the other rows.
    """

    def __init__(self, library: Library) -> None:
        self._rms_norm = library.function("sojourn_rms_norm", POINTER, POINTER, POINTER, INT, INT, FLOAT, FLOAT)
        self._add_rms_norm = library.function(
            "sojourn_add_rms_norm", POINTER, POINTER, POINTER, POINTER, INT, INT, FLOAT, FLOAT
        )
        self._gates = {kind: library.function(name, POINTER, POINTER, INT, INT) for kind, name in GATES.items()}
        self._write_heads = library.function("sojourn_write_heads", POINTER)
        self._write_rows = library.function("sojourn_write_rows", *(POINTER,) * 4, *(INT,) * 4, POINTER)
        self._heads, self._slots = HeadArguments(), SlotArguments()
        self._heads_address = ctypes.addressof(self._heads)
        self._normed, self._added, self._gated, self._query = (Workspace() for _ in range(4))

    def norm(self, kind: Norm, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        shift = SHIFTS.get(kind)
        if shift is None:
            return super().norm(kind, x, weight, eps)
        x = _whole(x)
        rows, size = x.shape
        normed = self._normed.shaped(rows, size)
        self._rms_norm(x.data_ptr(), weight.data_ptr(), normed.data_ptr(), rows, size, eps, shift)
        return normed

    def add_norm(
        self, kind: Norm, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shift = SHIFTS.get(kind)
        if shift is None:
            return super().add_norm(kind, x, residual, weight, eps)
        x, residual = _whole(x), _whole(residual)
        rows, size = x.shape
        normed = self._added.shaped(rows, size)
        self._add_rms_norm(
            x.data_ptr(), residual.data_ptr(), weight.data_ptr(), normed.data_ptr(), rows, size, eps, shift
        )
        return normed, residual

    def gate(self, kind: Gate, gate_up: torch.Tensor) -> torch.Tensor:
        kernel = self._gates.get(kind)
        if kernel is None:
            return super().gate(kind, gate_up)
        gate_up = _whole(gate_up)
        rows, size = gate_up.shape
        gated = self._gated.shaped(rows, size // 2)
        kernel(gate_up.data_ptr(), gated.data_ptr(), rows, size // 2)
        return gated

    def write_heads(
        self, qkv: torch.Tensor, heads: HeadSpec, rope: Rope | None, slots: torch.Tensor, layer_cache: LayerCache
    ) -> torch.Tensor:
        qkv, arguments = _whole(qkv), self._heads
        query = self._query.shaped(len(qkv), heads.num_heads, heads.head_dim)
        arguments.qkv, arguments.query, arguments.slots = qkv.data_ptr(), query.data_ptr(), slots.data_ptr()
        arguments.place_cache(layer_cache)
        if rope is None:
            arguments.cos = arguments.sin = arguments.positions = None
        else:
            arguments.cos, arguments.sin = rope.cos.data_ptr(), rope.sin.data_ptr()
            arguments.positions = rope.positions.data_ptr()
        if heads.q_norm is None:
            arguments.q_norm = arguments.k_norm = None
        else:
            arguments.q_norm, arguments.k_norm = heads.q_norm.data_ptr(), heads.k_norm.data_ptr()
            arguments.eps, arguments.norm_shift = heads.norm_eps, SHIFTS[heads.norm]
        arguments.num_tokens, arguments.num_heads = len(qkv), heads.num_heads
        arguments.num_kv_heads, arguments.head_dim = heads.num_kv_heads, heads.head_dim
        self._write_heads(self._heads_address)
        return query

    def write(
        self, key: torch.Tensor, value: torch.Tensor | None, slots: torch.Tensor, layer_cache: LayerCache
    ) -> None:
        keys, values, key_scales, value_scales = layer_cache.addresses()
        self._slots.place(layer_cache)
        places, kv_format = ctypes.addressof(self._slots), cpp_format(layer_cache.values.dtype)
        for rows, to, scales in ((key, keys, key_scales), (value, values, value_scales)):
            if rows is not None:
                rows = _whole(rows)
                self._write_rows(rows.data_ptr(), slots.data_ptr(), to, scales, *rows.shape, kv_format, places)


def _whole(x: torch.Tensor) -> torch.Tensor:
    return x if x.is_contiguous() else x.contiguous()
