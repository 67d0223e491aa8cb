"""Attention on a CPU that reads the blocks of the KV cache where they are: `cpp/attention.cpp` does the work."""

import ctypes

import torch

from sojourn.engine.compute.attention.backend import AttentionBackend, AttentionInputs, AttentionSpec
from sojourn.engine.compute.buffers import Workspace
from sojourn.engine.compute.cpp.extension import Library
from sojourn.engine.compute.kv_cache import LayerCache
from sojourn.engine.compute.kv_formats import cpp_format

POINTER, INT = ctypes.c_void_p, ctypes.c_int64


class AttentionArguments(ctypes.Structure):
    """`struct Attention` of kernels.h."""

    _fields_ = (
        *((name, POINTER) for name in ("query", "keys", "values", "key_scales", "value_scales", "output")),
        *((name, POINTER) for name in ("query_start", "contexts", "block_tables", "slopes", "sinks")),
        *(
            (name, INT)
            for name in (
                "block_stride",
                "token_stride",
                "head_stride",
                "table_stride",
                "num_sequences",
                "num_heads",
                "num_kv_heads",
            )
        ),
        *((name, INT) for name in ("head_dim", "value_dim", "block_size", "window", "sink_tokens", "kv_format")),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
        ("workspace", POINTER),
    )

    def place(self, inputs: AttentionInputs) -> None:
        """Fills in what all layers of a step share."""
        self.query_start, self.contexts = inputs.query_start.data_ptr(), inputs.contexts.data_ptr()
        self.block_tables, self.table_stride = inputs.block_tables.data_ptr(), inputs.block_tables.stride(0)
        self.num_sequences, self.block_size = len(inputs.query_lens), inputs.block_size

    def place_cache(self, cache: LayerCache) -> None:
        """Fills in where the vectors of a layer are, and in which format."""
        self.keys, self.values, self.key_scales, self.value_scales = cache.addresses()
        self.token_stride, self.head_stride = cache.strides()
        _, _, block_size, num_kv_heads, _ = cache.values.shape
        self.block_stride, self.num_kv_heads = block_size * num_kv_heads, num_kv_heads
        self.kv_format = cpp_format(cache.values.dtype)


class CppAttention(AttentionBackend):
    """Queries and results in float32, keys and values in it or quantised. A sequence's results depend neither on its
    company in the batch nor on the number of threads.

    The result of `attend` stands until the next call.
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        self._attend = library.function("sojourn_attend", POINTER)
        self._prepared: dict[AttentionSpec, tuple[AttentionArguments, int]] = {}  # and their address
        self._output = Workspace()

    def another(self) -> "CppAttention":
        return CppAttention(self._library)

    def begin(self, inputs: AttentionInputs) -> None:
        self.inputs = inputs  # the arguments point to them
        for arguments, _ in self._prepared.values():
            arguments.place(inputs)

    def attend(self, query: torch.Tensor, layer_cache: LayerCache, spec: AttentionSpec) -> torch.Tensor:
        prepared = self._prepared.get(spec)
        arguments, address = prepared if prepared is not None else self._prepare(spec)
        if not query.is_contiguous():
            query = query.contiguous()
        num_tokens, num_heads, head_dim = query.shape
        output = self._output.shaped(num_tokens, num_heads, spec.value_dim)
        arguments.query = query.data_ptr()
        arguments.place_cache(layer_cache)
        arguments.output = output.data_ptr()
        arguments.sinks = None if spec.sink_logits is None else spec.sink_logits.data_ptr()
        arguments.num_heads, arguments.head_dim = num_heads, head_dim
        self._attend(address)
        return output

    def _prepare(self, spec: AttentionSpec) -> tuple[AttentionArguments, int]:
        slopes = spec.alibi_slopes and (ctypes.c_float * len(spec.alibi_slopes))(*spec.alibi_slopes)
        arguments = AttentionArguments(
            value_dim=spec.value_dim,
            window=spec.window or 0,
            sink_tokens=spec.sink_tokens,
            scale=spec.scale,
            soft_cap=spec.soft_cap or 0.0,
        )
        if slopes:
            arguments.slopes = ctypes.addressof(slopes)
            arguments.slopes_array = slopes
        arguments.place(self.inputs)
        self._prepared[spec] = arguments, ctypes.addressof(arguments)
        return self._prepared[spec]
