"""The small operations of a layer, fused for a CPU: `cpp/operations.cpp` does the work."""

import ctypes

import torch

from engine.compute.attention import LayerCache
from engine.compute.cpp.extension import Library
from engine.compute.mixture import Experts
from engine.compute.operations import Gate, HeadSpec, Norm, Rope, TorchOperations
from engine.compute.reference_operations import gelu_gate, gemma_rms_norm, rms_norm, silu_gate

POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
SHIFTS = {rms_norm: 0.0, gemma_rms_norm: 1.0}  # of the weight, by the kind of norm
GATES = {silu_gate: "sojourn_silu_gate", gelu_gate: "sojourn_gelu_gate"}  # their kernels


class HeadArguments(ctypes.Structure):
    """`struct Heads` of kernels.h."""

    _fields_ = (
        *((name, POINTER) for name in ("qkv", "query", "keys", "values", "slots", "positions")),
        *((name, POINTER) for name in ("q_norm", "k_norm", "cos", "sin")),
        *((name, INT) for name in ("num_tokens", "num_heads", "num_kv_heads", "head_dim")),
        ("eps", FLOAT),
    )


class Room:
    """Memory for one operation's results, kept from step to step. It grows by doubling."""

    __slots__ = ("_memory", "_view")

    def __init__(self) -> None:
        self._memory = torch.empty(0)
        self._view = self._memory

    def shaped(self, *shape: int) -> torch.Tensor:
        if self._view.shape != shape:
            size = torch.Size(shape).numel()
            if self._memory.numel() < size:
                self._memory = torch.empty(max(size, 2 * self._memory.numel()))
            self._view = self._memory[:size].view(shape)
        return self._view


class CppOperations:
    """float32 only. What has no kernel is left to the reference.

    The gates' exponential is within 2 units in the last place. A row's results do not depend on the other rows.
    """

    def __init__(self, library: Library) -> None:
        self._reference = TorchOperations()
        self._rms_norm = library.function("sojourn_rms_norm", POINTER, POINTER, POINTER, INT, INT, FLOAT, FLOAT)
        self._add_rms_norm = library.function(
            "sojourn_add_rms_norm", POINTER, POINTER, POINTER, POINTER, INT, INT, FLOAT, FLOAT
        )
        self._gates = {kind: library.function(name, POINTER, POINTER, INT, INT) for kind, name in GATES.items()}
        self._write_heads = library.function("sojourn_write_heads", POINTER)
        self._write_rows = library.function("sojourn_write_rows", POINTER, POINTER, POINTER, INT, INT)
        self._heads = HeadArguments()
        self._heads_address = ctypes.addressof(self._heads)
        self._normed, self._added, self._gated, self._query = Room(), Room(), Room(), Room()

    def norm(self, kind: Norm, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        shift = SHIFTS.get(kind)
        if shift is None:
            return self._reference.norm(kind, x, weight, eps)
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
            return self._reference.add_norm(kind, x, residual, weight, eps)
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
            return self._reference.gate(kind, gate_up)
        gate_up = _whole(gate_up)
        rows, size = gate_up.shape
        gated = self._gated.shaped(rows, size // 2)
        kernel(gate_up.data_ptr(), gated.data_ptr(), rows, size // 2)
        return gated

    def write_heads(
        self, qkv: torch.Tensor, heads: HeadSpec, rope: Rope | None, slots: torch.Tensor, layer_cache: LayerCache
    ) -> torch.Tensor:
        qkv, cache, arguments = _whole(qkv), layer_cache.values, self._heads
        query = self._query.shaped(len(qkv), heads.num_heads, heads.head_dim)
        arguments.qkv, arguments.query, arguments.slots = qkv.data_ptr(), query.data_ptr(), slots.data_ptr()
        arguments.keys = keys = cache.data_ptr()
        arguments.values = keys + 4 * cache.stride(0)
        if rope is None:
            arguments.cos = arguments.sin = arguments.positions = None
        else:
            arguments.cos, arguments.sin = rope.cos.data_ptr(), rope.sin.data_ptr()
            arguments.positions = rope.positions.data_ptr()
        if heads.q_norm is None:
            arguments.q_norm = arguments.k_norm = None
        else:
            arguments.q_norm, arguments.k_norm = heads.q_norm.data_ptr(), heads.k_norm.data_ptr()
            arguments.eps = heads.norm_eps
        arguments.num_tokens, arguments.num_heads = len(qkv), heads.num_heads
        arguments.num_kv_heads, arguments.head_dim = heads.num_kv_heads, heads.head_dim
        self._write_heads(self._heads_address)
        return query

    def write(
        self, key: torch.Tensor, value: torch.Tensor | None, slots: torch.Tensor, layer_cache: LayerCache
    ) -> None:
        for plane, rows in ((0, key), (1, value)):
            if rows is not None:
                rows, to = _whole(rows), layer_cache.values[plane]
                self._write_rows(rows.data_ptr(), slots.data_ptr(), to.data_ptr(), len(rows), to.stride(0))

    def mixture(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        gate_up: Experts,
        down: Experts,
    ) -> torch.Tensor:
        return self._reference.mixture(x, weights, experts, gate_up, down)


def _whole(x: torch.Tensor) -> torch.Tensor:
    return x if x.is_contiguous() else x.contiguous()
