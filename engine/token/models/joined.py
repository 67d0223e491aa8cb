"""All layers of a decoder in one call, where the C++ kernels of a CPU have its matrices, operations and attention.

The layers must have grouped attention and gated feed-forward parts."""

from collections.abc import Sequence

import torch

from engine.compute.attention.backend import AttentionBackend
from engine.compute.attention.cpp_backend import CppAttention
from engine.compute.cpp.extension import library
from engine.compute.kv_cache import KVCache
from engine.compute.layers_cpp import CppLayers, LayerParts
from engine.compute.operations.backend import Operations
from engine.compute.operations.cpp_backend import GATES, SHIFTS, CppOperations
from engine.compute.weight_formats.cpp_formats import CppWeight
from engine.token.models.grouped import GroupedAttention
from engine.token.models.layer import DecoderConfig, Layer
from engine.token.models.mlp import GatedMLP


def joined_layers(
    config: DecoderConfig,
    layers: Sequence[tuple[Layer, torch.Tensor]],
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    operations: Operations,
    attention: AttentionBackend,
    kv_cache: KVCache,
) -> CppLayers | None:
    """`layers` come with the norm that follows each. None where some part has no kernel: then they are computed part by
    part."""
    in_kernels = isinstance(operations, CppOperations) and isinstance(attention, CppAttention)
    if not in_kernels or config.norm not in SHIFTS or not all(_is_plain(layer) for layer, _ in layers):
        return None
    parts, gate = [_parts(layer, next_norm) for layer, next_norm in layers], layers[0][0].mlp.gate
    return CppLayers(library(), parts, kv_cache, config.norm, config.norm_eps, gate, cos, sin)


def _is_plain(layer: Layer) -> bool:
    attention, mlp = layer.attention, layer.mlp
    if not isinstance(attention, GroupedAttention) or not isinstance(mlp, GatedMLP) or mlp.gate not in GATES:
        return False
    config, linears = attention.config, (attention.qkv, attention.o, mlp.gate_up, mlp.down)
    plain = config.clip is None and config.alibi_slopes is None
    return plain and all(isinstance(linear.packed, CppWeight) for linear in linears)


def _parts(layer: Layer, next_norm: torch.Tensor) -> LayerParts:
    attention, mlp = layer.attention, layer.mlp
    return LayerParts(
        attention.qkv.packed, attention.o.packed, mlp.gate_up.packed, mlp.down.packed,
        layer.post_norm, next_norm, attention.heads, attention.spec,
    )  # fmt: skip
