"""Tensors of a GGUF file under the names of a Hugging Face checkpoint: quantised ones as QuantisedMatrix."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sojourn.engine.compute.quantisation.matrix import QuantisedMatrix, Stored
from sojourn.engine.token.gguf.file import GGUFTensor, opened
from sojourn.engine.token.quantised.scheme import outlined_matrix
from sojourn.metrics.compute.startup import StartupClock
from sojourn.metrics.errors import ModelError

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GGUFWeights:
    """The weights of one file, as WeightSource has them."""

    name = "gguf"

    def __init__(self, path: Path, config: dict[str, Any]):
        self._file = opened(path)
        self._heads: dict[str, int] = {}  # of projections whose rows llama.cpp has reordered
        if self._file.metadata.get("general.architecture") == "llama":
            heads = config["num_attention_heads"]
            self._heads = {"attn_q": heads, "attn_k": config.get("num_key_value_heads") or heads}

    def outlined(self) -> Iterator[tuple[str, Stored]]:
        return self._named(_outline)

    def weights(self, load_format: str, startup: StartupClock) -> Iterator[tuple[str, Stored]]:
        if load_format.startswith("safetensors"):
            raise ModelError(f"load_format={load_format} is for safetensors, and {self._file.path} is GGUF; use auto")
        return self._named(_read)

    def read(self, name: str) -> torch.Tensor:
        stored = _read(next(tensor for tensor in self._file.tensors if self._name(tensor) == name))
        return stored if isinstance(stored, torch.Tensor) else stored.dequantised()

    def outline(self, module: str, outputs: int, inputs: int) -> QuantisedMatrix | None:
        stored = dict(self.outlined()).get(f"{module}.weight")
        return stored if isinstance(stored, QuantisedMatrix) else None

    def _named(self, read: Callable[[GGUFTensor], Stored]) -> Iterator[tuple[str, Stored]]:
        for tensor in self._file.tensors:
            if tensor.name != "rope_freqs.weight":  # config.json says it
                name, part, stored = self._name(tensor), tensor.name.split(".")[-2], read(tensor)
                yield name, self._restored(stored, self._heads[part]) if part in self._heads else stored

    def _name(self, tensor: GGUFTensor) -> str:
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", tensor.name)
        if match is None or match[2] not in NAMES:
            raise ModelError(f"tensor {tensor.name} of {self._file.path} has no place in this architecture")
        layer, part, suffix = match.groups()
        return f"{'' if layer is None else f'model.layers.{layer}.'}{NAMES[part]}.{suffix}"

    @staticmethod
    def _restored(stored: Stored, heads: int) -> Stored:
        """llama.cpp rotates neighbours and Hugging Face halves, so the rows of q and k of each head were reordered."""
        rows = len(stored)
        if rows % (2 * heads):
            raise ModelError(f"a projection of {rows} rows is not of {heads} heads; the file is of another model")
        index = torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).flatten()
        return stored[index] if isinstance(stored, torch.Tensor) else stored.reordered_rows(index)


def _outline(tensor: GGUFTensor) -> Stored:
    if tensor.kind in FORMS and len(tensor.shape) == 2:
        dtype, bits, group, zeros, _ = FORMS[tensor.kind]
        return outlined_matrix(*tensor.shape, dtype, bits, group, zeros=zeros)
    return torch.empty(tensor.shape, dtype=FLOATS.get(tensor.kind, torch.float32), device="meta")


def _read(tensor: GGUFTensor) -> Stored:
    if tensor.kind in FORMS and len(tensor.shape) == 2:
        return FORMS[tensor.kind][-1](torch.from_numpy(np.array(tensor.data)))
    if tensor.kind == "BF16":
        return torch.from_numpy(np.array(tensor.data)).view(torch.bfloat16).reshape(tensor.shape)
    if tensor.kind in FLOATS:
        return torch.from_numpy(np.array(tensor.data)).reshape(tensor.shape)
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    try:  # other kinds are read, but have no form of their own here
        numbers = dequantize(np.asarray(tensor.data), GGMLQuantizationType[tensor.kind])
    except NotImplementedError:
        sentence = f"tensor {tensor.name} is {tensor.kind}, which cannot be read; use Q4_0, Q4_K, Q6_K or Q8_0"
        raise ModelError(sentence) from None
    return torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.float32)).reshape(tensor.shape)


def _halves(octets: torch.Tensor) -> torch.Tensor:
    """[..., 2] uint8 → [...] float32 of a float16."""
    return octets.contiguous().view(torch.float16).squeeze(-1).float()


def _blocks(data: torch.Tensor, size: int) -> torch.Tensor:
    return data.unflatten(1, (-1, size))  # [rows, blocks, bytes of a block]


def _q8_0(data: torch.Tensor) -> QuantisedMatrix:
    """32 weights: a float16 scale, 32 int8."""
    blocks = _blocks(data, 34)
    codes = blocks[..., 2:].contiguous().view(torch.int8).flatten(1)
    return QuantisedMatrix(codes, _halves(blocks[..., :2]), None, 32, 8)


def _q4_0(data: torch.Tensor) -> QuantisedMatrix:
    """32 weights: a float16 scale, 16 bytes; the lower nibbles are the first half, less 8."""
    blocks = _blocks(data, 18)
    octets = blocks[..., 2:]
    codes = torch.cat([octets & 15, octets >> 4], dim=-1).flatten(1)
    return QuantisedMatrix((codes - 8).view(torch.int8), _halves(blocks[..., :2]), None, 32, 4)


def _q4_k(data: torch.Tensor) -> QuantisedMatrix:
    """256 weights: float16 factors of the scales and of the least values, eight of each in 6 bits, 128 bytes of
    nibbles: 32 lower ones, then the 32 upper ones. weight = d * scale * code - d_min * least."""
    blocks = _blocks(data, 144)
    d, d_min = _halves(blocks[..., 0:2]), _halves(blocks[..., 2:4])
    low, least, both = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat([low & 63, (both & 15) | ((low >> 2) & 48)], dim=-1).float() * d[..., None]
    minima = torch.cat([least & 63, (both >> 4) | ((least >> 2) & 48)], dim=-1).float() * d_min[..., None]
    octets = blocks[..., 16:].unflatten(-1, (4, 32))
    codes = torch.stack([octets & 15, octets >> 4], dim=-2).flatten(-3)  # [rows, blocks, 256]
    # Without a scale the weights are all less one value: codes of 0, less one, scaled by that value.
    flat = scales == 0
    codes = torch.where(flat.repeat_interleave(32, dim=-1), 0, codes).to(torch.uint8)
    zeros = torch.where(flat, 1.0, minima / torch.where(flat, 1.0, scales))
    scales = torch.where(flat, minima, scales)
    return QuantisedMatrix(codes.flatten(1), scales.flatten(1), zeros.flatten(1), 32, 4)


def _q6_k(data: torch.Tensor) -> QuantisedMatrix:
    """256 weights: 128 bytes of the lower 4 bits, 64 of the upper 2, 16 int8 scales, a float16 factor; less 32."""
    blocks = _blocks(data, 210)
    low = blocks[..., :128].unflatten(-1, (2, 1, 64))
    low = torch.cat([low & 15, low >> 4], dim=-2).flatten(-3)
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32))
    high = torch.cat([(high >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-2).flatten(-3)
    codes = ((low | (high << 4)) - 32).view(torch.int8)
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float() * _halves(blocks[..., 208:])[..., None]
    return QuantisedMatrix(codes.flatten(1), scales.flatten(1), None, 16, 6)


# ggml's name → dtype of codes, bits, group, whether there are zeros, and the reader of [rows, bytes].
FORMS: dict[str, tuple[torch.dtype, int, int, bool, Callable[[torch.Tensor], QuantisedMatrix]]] = {
    "Q8_0": (torch.int8, 8, 32, False, _q8_0),
    "Q4_0": (torch.int8, 4, 32, False, _q4_0),
    "Q4_K": (torch.uint8, 4, 32, True, _q4_k),
    "Q6_K": (torch.int8, 6, 16, False, _q6_k),
}
