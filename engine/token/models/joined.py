"""Which decoders compute all their layers in one call: those of grouped attention and gated feed-forward parts whose
matrices, operations and attention are all in the C++ kernels of a CPU."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from engine.compute.attention import AttentionBackend, KVCache
from engine.compute.attention_cpp import CppAttention
from engine.compute.cpp.extension import library
from engine.compute.layers_cpp import CppLayers, LayerParts
from engine.compute.operations import Operations
from engine.compute.operations_cpp import GATES, SHIFTS, CppOperations
from engine.compute.weight_formats.cpp_formats import FloatWeight, Int8Weight
from engine.token.models.grouped import GroupedAttention
from engine.token.models.mlp import GatedMLP

if TYPE_CHECKING:
    from engine.token.models.decoder import Decoder, Layer


def joined_layers(
    model: Decoder, operations: Operations, attention: AttentionBackend, kv_cache: KVCache
) -> CppLayers | None:
    """None where some part of a layer has no kernel there, and the layers are computed part by part."""
    config, layers = model.config, list(model.layers)
    in_kernels = isinstance(operations, CppOperations) and isinstance(attention, CppAttention)
    if not in_kernels or config.norm not in SHIFTS or not all(map(_is_plain, layers)):
        return None
    norms = [layer.input_norm for layer in layers[1:]] + [model.norm]
    return CppLayers(
        library(), list(itertools.starmap(_parts, zip(layers, norms, strict=True))), kv_cache, config.norm,
        config.norm_eps, layers[0].mlp.gate, model.cos, model.sin,
    )  # fmt: skip


def _is_plain(layer: Layer) -> bool:
    attention, mlp = layer.attention, layer.mlp
    if not isinstance(attention, GroupedAttention) or not isinstance(mlp, GatedMLP) or mlp.gate not in GATES:
        return False
    config, linears = attention.config, (attention.qkv, attention.o, mlp.gate_up, mlp.down)
    plain = config.clip is None and config.alibi_slopes is None
    return plain and all(isinstance(linear.packed, FloatWeight | Int8Weight) for linear in linears)


def _parts(layer: Layer, next_norm) -> LayerParts:
    attention, mlp = layer.attention, layer.mlp
    return LayerParts(
        attention.qkv.packed, attention.o.packed, mlp.gate_up.packed, mlp.down.packed,
        layer.post_norm, next_norm, attention.heads, attention.spec,
    )  # fmt: skip
