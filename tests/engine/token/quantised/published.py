"""Quantised checkpoints as other tools publish them, each with the dense weights that its tensors stand for.

compressed-tensors writes its own formats; AWQ, GPTQ and block FP8 are packed here number by number, as their papers'
code lays them out, by nothing of the engine.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Quantise = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]  # weight → tensors by suffix, the dense weight

PACKED, INT, FLOAT, NVFP4, MXFP4 = (
    "pack-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized",
)  # fmt: skip


def matrices(folder: Path) -> Tensors:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def publish(
    source: Path, target: Path, settings: dict, quantise: Quantise, skip: tuple[str, ...] = ()
) -> tuple[Path, Path]:
    """Folders of a quantised checkpoint, and of a dense one of the same values, made of a dense one."""
    stored, dense = {}, {}
    for name, tensor in matrices(source).items():
        module = name.removesuffix(".weight")
        if not re.search(r"(_proj|\.w[123])\.weight$", name) or any(part in name for part in skip):
            stored[name] = dense[name] = tensor
            continue
        parts, dense[name] = quantise(tensor)
        stored |= {module + suffix: part.contiguous() for suffix, part in parts.items()}
    config = json.loads((source / "config.json").read_text())
    folders = target / "quantised", target / "dense"
    for folder, tensors, extra in zip(folders, (stored, dense), ({"quantization_config": settings}, {}), strict=True):
        folder.mkdir(parents=True)
        save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config | extra))
        for path in source.glob("*token*"):
            shutil.copy(path, folder)
    return folders


def by_library(form: str, weights: dict, inputs: dict | None = None) -> tuple[dict, Quantise]:
    """quantization_config and the quantisation, both of the compressed-tensors library."""
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs)
    args = scheme.weights
    compressor = BaseCompressor.get_value_from_registry(form)

    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows = weight[None] if args.strategy == "tensor" else weight
        grouped = rows.reshape(1 if args.strategy == "tensor" else len(weight), -1, args.group_size or rows[0].numel())
        least, most = grouped.amin(-1), grouped.amax(-1)
        state = {"weight": weight}
        if args.strategy == "tensor_group":
            state["weight_global_scale"] = (448.0 * 6.0 / weight.abs().max()).reshape(1)
        scales, zeros = calculate_qparams(least, most, args, global_scale=state.get("weight_global_scale"))
        state |= {"weight_scale": scales, "weight_zero_point": zeros}
        if args.strategy == "tensor":
            state |= {"weight_scale": scales.reshape(1), "weight_zero_point": zeros.reshape(1)}
        stored = compressor.compress(state, scheme)
        if inputs is not None and inputs.get("dynamic") is False:
            stored["input_scale"] = torch.tensor([0.02])
        dense = compressor.decompress(stored, scheme)["weight"].float()
        if form == NVFP4:  # the library's own product is rounded to bfloat16
            numbers = unpack_fp4_from_uint8(stored["weight_packed"], *weight.shape, torch.float32)
            scales = stored["weight_scale"].float() / stored["weight_global_scale"]
            dense = numbers * scales.repeat_interleave(16, dim=1)
        return {f".{name}": tensor for name, tensor in stored.items()}, dense

    settings = {
        "quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
        "config_groups": {"group_0": scheme.model_dump(mode="json")},
    }  # fmt: skip
    return settings, quantise


def _rounded(weight: np.ndarray, bits: int, group: int, symmetric: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [out, in], scales and zeros [out, groups], of float16 scales."""
    grouped = weight.reshape(len(weight), -1, group)
    most = 2**bits - 1
    if symmetric:
        scales = np.abs(grouped).max(-1) * 2 / most
        zeros = np.full_like(scales, 2 ** (bits - 1))
    else:
        low, high = np.minimum(grouped.min(-1), 0), np.maximum(grouped.max(-1), 0)
        scales = (high - low) / most
        zeros = np.round(-low / scales)
    scales = scales.astype(np.float16).astype(np.float32)
    codes = np.clip(np.round(grouped / scales[..., None]) + zeros[..., None], 0, most)
    return codes.reshape(weight.shape).astype(np.int64), scales, zeros.astype(np.int64)


def _words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Along the last axis, bit by bit into words of 32, the lowest first."""
    stream = ((codes[..., None] >> np.arange(bits)) & 1).reshape(*codes.shape[:-1], -1)
    stream = np.pad(stream, [(0, 0)] * (stream.ndim - 1) + [(0, -stream.shape[-1] % 32)])
    words = (stream.reshape(*stream.shape[:-1], -1, 32).astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(-1)
    return words.astype(np.uint32).view(np.int32)


def awq(group: int = 32) -> tuple[dict, Quantise]:
    """AutoAWQ's GEMM layout: nibble i of a word holds column ORDER[i] of its eight."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def packed(codes: np.ndarray) -> torch.Tensor:  # [rows, columns]
        return torch.from_numpy(_words(codes.reshape(len(codes), -1, 8)[:, :, order].reshape(codes.shape), 4))

    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, scales, zeros = _rounded(weight.numpy(), 4, group, symmetric=False)
        dense = (codes.reshape(len(codes), -1, group) - zeros[..., None]) * scales[..., None]
        parts = {".qweight": packed(codes.T), ".qzeros": packed(zeros.T), ".scales": torch.from_numpy(scales.T).half()}
        return parts, torch.from_numpy(dense.reshape(weight.shape)).float()

    return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}, quantise


def gptq(
    bits: int = 4, group: int = 32, *, symmetric: bool = True, version: int = 1, activation_order: bool = False
) -> tuple[dict, Quantise]:
    """AutoGPTQ's layout. With activation order every layer has the inputs of a group scattered, all in one way."""

    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        inputs, size = weight.shape[1], weight.shape[1] if group == -1 else group
        order = np.random.default_rng(inputs).permutation(inputs) if activation_order else np.arange(inputs)
        codes, scales, zeros = _rounded(weight.numpy()[:, order], bits, size, symmetric)
        dense = ((codes.reshape(len(codes), -1, size) - zeros[..., None]) * scales[..., None]).reshape(weight.shape)
        back = np.argsort(order)
        stored_zeros = zeros.T - (1 if version == 1 else 0)
        parts = {
            ".qweight": torch.from_numpy(_words(codes[:, back], bits).T.copy()),
            ".qzeros": torch.from_numpy(_words(stored_zeros & (2**bits - 1), bits)),
            ".scales": torch.from_numpy(scales.T.copy()).half(),
            ".g_idx": torch.from_numpy((back // size).astype(np.int32)),
        }
        return parts, torch.from_numpy(dense[:, back]).float()

    settings = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric,
                "desc_act": activation_order} | ({"checkpoint_format": "gptq_v2"} if version == 2 else {})  # fmt: skip
    return settings, quantise


def block_fp8(rows: int = 48, columns: int = 32) -> tuple[dict, Quantise]:
    """DeepSeek's: weight_scale_inv multiplies, the last blocks may be smaller."""

    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, dense = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
        scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
        for i, j in np.ndindex(*scales.shape):
            part = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = weight[part].abs().max() / 448
            codes[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
            dense[part] = codes[part].float() * scales[i, j]
        return {".weight": codes, ".weight_scale_inv": scales}, dense

    return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": [rows, columns]}, quantise  # fmt: skip


def tensor_fp8() -> tuple[dict, Quantise]:
    """One scale a matrix, and one for its activations."""

    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        scale = weight.abs().max() / 448
        codes = (weight / scale).to(torch.float8_e4m3fn)
        return {".weight": codes, ".weight_scale": scale, ".input_scale": torch.tensor(0.02)}, codes.float() * scale

    return {"quant_method": "fp8", "activation_scheme": "static"}, quantise


def modelopt_nvfp4() -> tuple[dict, Quantise]:
    """NVFP4 as ModelOpt names it: the global scale multiplies."""
    _, by_tensors = by_library(NVFP4, {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16})

    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        parts, dense = by_tensors(weight)
        return {
            ".weight": parts[".weight_packed"], ".weight_scale": parts[".weight_scale"],
            ".weight_scale_2": 1 / parts[".weight_global_scale"], ".input_scale": torch.tensor(1.0),
        }, dense  # fmt: skip

    return {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, quantise
