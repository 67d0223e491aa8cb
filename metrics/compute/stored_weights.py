"""In which formats a checkpoint stores its weights, as its config.json says."""

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import msgspec

from sojourn.metrics.compute.number_formats import FORMATS, NumberFormat, weight_format
from sojourn.metrics.errors import InputError, ModelError

Part = Literal["attention", "mlp", "experts"]
PARTS: tuple[Part, ...] = ("attention", "mlp", "experts")
# A module for each part of a layer, under the names that lists of exceptions use.
MODULES: dict[Part, tuple[str, ...]] = {
    "attention": ("self_attn.q_proj", "self_attn.q_a_proj", "self_attn.o_proj"),
    "mlp": ("mlp.gate_proj", "mlp.down_proj", "mlp.shared_experts.up_proj"),
    "experts": ("mlp.experts.0.gate_proj", "block_sparse_moe.experts.0.w1", "mlp.experts"),
}


class StoredWeights(msgspec.Struct, frozen=True):
    """Embedding, head, routers, norms and biases are always `plain`."""

    plain: NumberFormat
    packed: NumberFormat | None = None  # of the matrices
    shares: Mapping[str, float] = {}  # part → share of its layers whose matrices are packed

    @property
    def name(self) -> str:
        return (self.packed or self.plain).name


def stored_weights(config: Mapping[str, Any], num_layers: int, mixture: Sequence[int]) -> StoredWeights:
    """Raises ModelError for a method of quantisation that is not known here."""
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16").removeprefix("torch.")
    try:
        plain = weight_format(dtype)
    except InputError as error:
        raise ModelError(f"config.json: {error}") from None
    said = config.get("quantization_config")
    if not isinstance(said, Mapping):
        return StoredWeights(plain)
    packed = _packed(said)
    if packed is None:
        return StoredWeights(plain)
    return StoredWeights(packed=packed, plain=plain, shares=_shares(said, num_layers, set(mixture)))


def chosen_weights(stored: StoredWeights, name: str, *, has_experts: bool) -> StoredWeights:
    """The same weights packed as `name`. "auto" leaves them as they are stored. MXFP4 packs experts alone where there
    are some. Raises InputError for an unknown name."""
    if name == "auto":
        return stored
    wanted = weight_format(name)
    if wanted.name == stored.name:
        return stored
    if wanted.bits >= 16:
        return StoredWeights(wanted)
    plain = stored.plain if stored.plain.bits <= 16 else FORMATS["bf16"]
    parts = ("experts",) if wanted.name == "mxfp4" and has_experts else PARTS
    return StoredWeights(plain, wanted, dict.fromkeys(parts, 1.0))


def _packed(said: Mapping[str, Any]) -> NumberFormat | None:
    method = str(said.get("quant_method") or said.get("quant_algo") or "").lower()
    if method in ("fp8", "fbgemm_fp8"):
        return FORMATS["fp8_block" if said.get("weight_block_size") else "fp8"]
    if method in ("awq", "gptq", "auto-round", "intel/auto-round"):
        return _grouped(_bits(said, 4), said.get("group_size"), 4 if said.get("zero_point", True) else 0)
    if method == "mxfp4":
        return FORMATS["mxfp4"]
    if method == "bitsandbytes":
        return NumberFormat("int4", 4, 32, 64) if said.get("load_in_4bit") else FORMATS["int8"]
    if method in ("modelopt", "modelopt_fp4", "nvfp4"):
        algorithm = str(said.get("quant_algo") or (said.get("quantization") or {}).get("quant_algo") or "").upper()
        if algorithm in ("NVFP4", "FP8"):
            return FORMATS[algorithm.lower()]
    if method == "compressed-tensors":
        return _compressed(said)
    if method in ("", "none"):
        return None
    raise ModelError(
        f"config.json has quantization {method}, whose sizes are not known here; known are fp8, fbgemm_fp8, awq, gptq, "
        "mxfp4, bitsandbytes, modelopt (NVFP4, FP8) and compressed-tensors"
    )


def _bits(said: Mapping[str, Any], usual: int) -> int:
    bits = said.get("bits") or said.get("w_bit") or said.get("num_bits") or usual
    if bits not in (4, 8):
        raise ModelError(f"config.json has weights of {bits} bits; known are 4 and 8")
    return int(bits)


def _grouped(bits: int, group: Any, zero_bits: int) -> NumberFormat:
    if bits == 8:
        return FORMATS["int8"]
    size = group if isinstance(group, int) and group > 0 else 1 << 20  # -1: a whole row shares a scale
    return NumberFormat("int4", 4, 16 + zero_bits, size)


def _compressed(said: Mapping[str, Any]) -> NumberFormat:
    groups = said.get("config_groups") or {}
    weights = next((each.get("weights") for each in groups.values() if isinstance(each, Mapping)), None) or {}
    bits = _bits(weights, 8)
    if weights.get("type") == "float":
        if bits == 8:
            return FORMATS["fp8_block" if weights.get("strategy") == "block" else "fp8"]
        return FORMATS["mxfp4" if weights.get("group_size") == 32 else "nvfp4"]
    return _grouped(bits, weights.get("group_size"), 0 if weights.get("symmetric", True) else 4)


def _shares(said: Mapping[str, Any], num_layers: int, mixture: set[int]) -> dict[str, float]:
    """Of each part, in how many of the layers that have it its matrices are not among the exceptions."""
    excepted: list[str] = []
    for key in ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules"):
        if isinstance(names := said.get(key), list):
            excepted += [str(name) for name in names]
    places: dict[Part, list[int]] = {
        "attention": list(range(num_layers)), "mlp": list(range(num_layers)), "experts": sorted(mixture),
    }  # fmt: skip
    found: dict[str, float] = {}
    for part, own in places.items():
        kept = [place for place in own if any(_is_excepted(place, module, excepted) for module in MODULES[part])]
        found[part] = 1 - len(kept) / len(own) if own else 1.0
    return found


def _is_excepted(layer: int, module: str, excepted: Sequence[str]) -> bool:
    name = f"model.layers.{layer}.{module}"
    for each in excepted:
        if each.startswith("re:"):
            if re.match(each[3:], name):
                return True
        elif "*" in each:
            if fnmatchcase(name, each) or fnmatchcase(name, f"{each}.*"):
                return True
        elif name == each or f".{name}.".find(f".{each}.") >= 0:
            return True
    return False
