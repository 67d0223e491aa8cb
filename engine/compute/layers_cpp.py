"""All layers of a decoder in one call, for a CPU: `cpp/layers.cpp` does the work, by the kernels that it calls."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sojourn.engine.compute.addition import Addition
from sojourn.engine.compute.attention.backend import AttentionInputs, AttentionSpec
from sojourn.engine.compute.attention.cpp_backend import AttentionArguments
from sojourn.engine.compute.cpp.extension import Library
from sojourn.engine.compute.cpp.matrices import CppWeight
from sojourn.engine.compute.kv_cache import KVCache, LayerCache
from sojourn.engine.compute.operations.backend import Gate, HeadSpec, Norm
from sojourn.engine.compute.operations.cpp_backend import GATES, SHIFTS, HeadArguments

POINTER, INT = ctypes.c_void_p, ctypes.c_int64
MOST_PARTS = 6  # of a packed matrix
RopeTable = tuple[torch.Tensor, torch.Tensor]  # cos and sin [max_len, 1, head_dim]

# What a layer computes, in order: class of the kernel (metrics.compute.kernels.CLASSES), name. `marks` tells when.
PARTS = (
    ("gemm", "qkv"), ("rope_kv", "rope and cache write"), ("attention", "attend"), ("gemm", "o"), ("norm", "add norm"),
    ("gemm", "gate up"), ("other", "gate"), ("gemm", "down"), ("norm", "add norm"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayerParts:
    """What one layer is made of: grouped attention, then a gated feed-forward part, each behind a norm or two."""

    qkv: CppWeight
    o: CppWeight
    gate_up: CppWeight
    down: CppWeight
    post_norm: torch.Tensor
    next_norm: torch.Tensor  # the first one of the layer behind, or the last of all
    heads: HeadSpec
    spec: AttentionSpec
    rope: RopeTable | None
    additions: Sequence[Addition | None]  # to the four products in their order: of all layers, or of none
    attention_norm: torch.Tensor | None = None  # of what attention gives
    mlp_norm: torch.Tensor | None = None


class _Linear(ctypes.Structure):
    _fields_ = (
        ("kernel", POINTER), *((name, INT) for name in ("num_parts", "out_features", "in_features")),
        ("parts", POINTER * MOST_PARTS),
    )  # fmt: skip


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Linear) for name in ("qkv", "o", "gate_up", "down")),
        *((name, POINTER) for name in ("post_norm", "next_norm", "q_norm", "k_norm")),
        *((name, POINTER) for name in ("attention_norm", "mlp_norm", "cos", "sin")),
        *((name, POINTER) for name in ("keys", "values", "key_scales", "value_scales")),
        ("window", INT),
        ("adapters", POINTER * 4),
    )


class _Layers(ctypes.Structure):
    _fields_ = (
        ("layers", POINTER), *((name, INT) for name in ("num_layers", "hidden_size", "intermediate_size")),
        *((name, POINTER) for name in ("gate", "residual", "normed", "room")),
        ("heads", HeadArguments), ("attention", AttentionArguments),
        ("eps", ctypes.c_float), ("shift", ctypes.c_float), ("adapters", POINTER), ("marks", POINTER),
    )  # fmt: skip


class CppLayers:
    """float32. Gives the bits that the same kernels give when they are called one by one.

    All layers are alike but for their weights, their windows and their angles.
    """

    def __init__(
        self,
        library: Library,
        layers: Sequence[LayerParts],
        kv_cache: KVCache,
        norm: Norm,
        eps: float,
        gate: Gate,
    ):
        self._run = library.function("sojourn_layers", POINTER)
        self._references = (layers, kv_cache)  # the arguments point to them
        caches = kv_cache.layers()
        self._layers = (_Layer * len(layers))(*map(_layer, layers, caches))
        first, heads, spec = layers[0], layers[0].heads, layers[0].spec
        hidden_size, intermediate_size = first.o.out_features, first.down.in_features
        query_size = heads.num_heads * heads.head_dim
        self._room_size = 2 * query_size + hidden_size + max(first.qkv.out_features, 3 * intermediate_size)
        self._room = torch.empty(0)
        self._arguments = _Layers(
            layers=ctypes.addressof(self._layers), num_layers=len(layers), hidden_size=hidden_size,
            intermediate_size=intermediate_size, gate=library.address(GATES[gate]), eps=eps, shift=SHIFTS[norm],
            heads=HeadArguments(
                num_heads=heads.num_heads, num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim,
                eps=heads.norm_eps, norm_shift=SHIFTS[heads.norm],
            ),
            attention=AttentionArguments(
                num_heads=heads.num_heads, head_dim=heads.head_dim, value_dim=spec.value_dim, scale=spec.scale,
                sink_tokens=spec.sink_tokens,
                soft_cap=spec.soft_cap or 0.0,
            ),
        )  # fmt: skip
        self._arguments.heads.place_cache(caches[0])
        self._arguments.attention.place_cache(caches[0])
        self._addition = first.additions[0]
        self._address = ctypes.addressof(self._arguments)
        self.watch: Callable[[Sequence[int]], None] | None = None  # gets the marks of each call

    def __call__(
        self,
        normed: torch.Tensor,
        residual: torch.Tensor,
        positions: torch.Tensor,
        inputs: AttentionInputs,
        layers: range,
    ) -> torch.Tensor:
        """normed, by the first norm of the first of `layers`, and residual, both [num_tokens, hidden_size] and
        overwritten, → hidden states after the norm behind the last of them, in `normed`."""
        arguments, num_tokens = self._arguments, len(residual)
        arguments.layers = ctypes.addressof(self._layers) + layers.start * ctypes.sizeof(_Layer)
        arguments.num_layers = len(layers)
        if self._room.numel() < num_tokens * self._room_size:
            self._room = torch.empty(2 * num_tokens * self._room_size)
        arguments.residual, arguments.normed = residual.data_ptr(), normed.data_ptr()
        arguments.room = self._room.data_ptr()
        heads = arguments.heads
        heads.num_tokens, heads.slots, heads.positions = num_tokens, inputs.slots.data_ptr(), positions.data_ptr()
        arguments.attention.place(inputs)
        if self._addition is not None:
            arguments.adapters = self._addition.step_address
        if self.watch is None:
            self._run(self._address)
        else:
            marks = (INT * (1 + len(PARTS) * arguments.num_layers))()
            arguments.marks = ctypes.addressof(marks)
            self._run(self._address)
            arguments.marks = None
            self.watch(marks)
        return normed


def _layer(parts: LayerParts, cache: LayerCache) -> _Layer:
    heads, (cos, sin) = parts.heads, parts.rope or (None, None)
    keys, values, key_scales, value_scales = cache.addresses()
    return _Layer(
        qkv=_linear(parts.qkv), o=_linear(parts.o), gate_up=_linear(parts.gate_up), down=_linear(parts.down),
        post_norm=parts.post_norm.data_ptr(), next_norm=parts.next_norm.data_ptr(),
        q_norm=_address(heads.q_norm), k_norm=_address(heads.k_norm), attention_norm=_address(parts.attention_norm),
        mlp_norm=_address(parts.mlp_norm), cos=_address(cos), sin=_address(sin), keys=keys, values=values,
        key_scales=key_scales, value_scales=value_scales, window=parts.spec.window or 0,
        adapters=(POINTER * 4)(*(each and each.address for each in parts.additions)),
    )  # fmt: skip


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _linear(weight: CppWeight) -> _Linear:
    pointers = (*weight.pointers, *(None,) * (MOST_PARTS - len(weight.pointers)))
    kernel, parts = ctypes.cast(weight.kernel, POINTER), (POINTER * MOST_PARTS)(*pointers)
    return _Linear(kernel, len(weight.pointers), weight.out_features, weight.in_features, parts)
