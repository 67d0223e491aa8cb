"""What a LoRA checkpoint of PEFT says of itself: adapter_config.json, and the header of adapter_model.safetensors.

Knows no torch, so that the front can describe an adapter.
"""

import hashlib
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import re2
from safetensors import SafetensorError, safe_open

from sojourn.engine.adapter import AdapterReference
from sojourn.engine.settings.lora import LARGEST_RANK
from sojourn.engine.token.checkpoint import read_json
from sojourn.metrics.errors import InputError, ModelError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
STORED = {"F32": 4, "F16": 2, "BF16": 2}  # dtypes and their bytes
KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
# Options of training, and those that are read below. Others must be absent, null, false or empty.
KNOWN = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying",
    "ephemeral_gpu_offload", "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights",
    "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config",
    "megatron_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern",
    "revision", "runtime_config", "target_modules", "task_type", "use_rslora",
}  # fmt: skip
# Their base model is not the published one: PEFT took a part out of its weights when training began.
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
REASONS = {
    "use_dora": "DoRA scales the rows of the merged matrix, which no low-rank delta does; merge it into the base model",
    "modules_to_save": "it brings whole modules of its own; merge it into the base model",
    "target_parameters": "it adapts experts or other plain parameters, which are not supported",
    "trainable_token_indices": "it changes embeddings, which is not supported",
    "lora_bias": "biases of adapters are not supported",
    "layer_replication": "it repeats layers of its base model, which is not supported",
}

log = logging.getLogger(__name__)


class AdapterError(InputError):
    """An adapter that cannot be served, with a sentence."""


@dataclass(frozen=True, slots=True)
class AdapterModule:
    """The matrices of one module: its output gets scale * B(A x) more."""

    name: str  # of the module in transformers
    rank: int
    in_features: int
    out_features: int
    scale: float

    @property
    def parameters(self) -> int:
        return self.rank * (self.in_features + self.out_features)


@dataclass(frozen=True, slots=True)
class AdapterDescription:
    """An adapter without its weights."""

    folder: Path
    digest: str
    base_model: str | None
    modules: tuple[AdapterModule, ...]
    nbytes: int

    def named(self, name: str) -> AdapterReference:
        rank, parameters = max(module.rank for module in self.modules), sum(m.parameters for m in self.modules)
        return AdapterReference(name, str(self.folder), self.digest, rank, parameters, self.nbytes)


def describe(folder: Path) -> AdapterDescription:
    """Reads all its bytes once, for the digest. Raises AdapterError."""
    try:
        if not folder.is_dir():
            raise AdapterError(f"adapter folder {folder} does not exist")
        config = read_json(folder, CONFIG)
    except ModelError as error:
        raise AdapterError(str(error)) from None
    if not config:
        raise AdapterError(f"{folder} has no {CONFIG}; give the folder of a LoRA checkpoint that PEFT wrote")
    _check_config(config)
    if not (folder / WEIGHTS).is_file():
        raise AdapterError(f"{folder} has no {WEIGHTS}; adapters in other formats are not read")
    sides, nbytes = _matrices(folder / WEIGHTS)
    modules = tuple(_module(config, name, *sides[name]) for name in sorted(sides))
    base = config.get("base_model_name_or_path")
    return AdapterDescription(folder, content_digest(folder), base if isinstance(base, str) else None, modules, nbytes)


def content_digest(folder: Path) -> str:
    """Of both files. Raises AdapterError."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        for name in (CONFIG, WEIGHTS):
            with open(folder / name, "rb") as file:
                digest.update(hashlib.file_digest(file, hashlib.blake2b).digest())
    except OSError as error:
        raise AdapterError(f"adapter {folder} cannot be read: {error.strerror}") from None
    return digest.hexdigest()


def _check_config(config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"{CONFIG} has peft_type={config.get('peft_type')!r}; only LORA is supported")
    if config.get("bias", "none") != "none":
        raise AdapterError(f"{CONFIG} has bias={config['bias']!r}; biases of adapters are not supported")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(CHANGES_BASE):
        raise AdapterError(
            f"{CONFIG} has init_lora_weights={start!r}: it belongs to a base model that training changed; convert it "
            "to a plain LoRA with PEFT's save_pretrained"
        )
    for key, value in config.items():
        if key not in KNOWN and value not in (None, False, [], {}):
            reason = REASONS.get(key, "it is not supported")
            raise AdapterError(f"{CONFIG} has {key}={str(value)[:80]!r}: {reason}")


def _matrices(path: Path) -> tuple[dict[str, list[tuple[str, list[int]]]], int]:
    """Module → key and shape of A and of B, and the bytes of all. Raises AdapterError."""
    found: dict[str, dict[str, tuple[str, list[int]]]] = {}
    nbytes = 0
    try:
        with safe_open(path, framework="np") as file:
            for key in sorted(file.keys()):
                part = file.get_slice(key)
                shape, dtype = part.get_shape(), part.get_dtype()
                module, side = matrix_of(key)
                if dtype not in STORED or len(shape) != 2 or 0 in shape:
                    raise AdapterError(f"tensor {key} is {dtype} {shape}; it must be a matrix of 16 or 32 bit floats")
                found.setdefault(module, {})[side] = key, shape
                nbytes += math.prod(shape) * STORED[dtype]
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{path} is damaged or not complete: {error}; download it again") from None
    if not found:
        raise AdapterError(f"{path} holds no tensors")
    for module, sides in found.items():
        if len(sides) == 1:
            raise AdapterError(f"{path} has lora_{''.join(sides)} of {module}, but not the other matrix")
    return {module: [sides["A"], sides["B"]] for module, sides in found.items()}, nbytes


def matrix_of(key: str) -> tuple[str, str]:
    """The module of a tensor, and "A" or "B". Raises AdapterError."""
    match = KEY.fullmatch(key)
    if match is None:
        raise AdapterError(f"tensor {key[:200]} is no LoRA matrix of a linear layer, and nothing else is supported")
    return match["module"], match["side"]


def _module(config: Mapping[str, Any], name: str, a: tuple[str, list[int]], b: tuple[str, list[int]]) -> AdapterModule:
    (a_key, (rank, in_features)), (b_key, (out_features, b_rank)) = a, b
    if rank != b_rank:
        raise AdapterError(f"tensor {b_key} has shape [{out_features}, {b_rank}], but {a_key} has rank {rank}")
    said = _by_pattern(config, "rank_pattern", "r", name)
    if said != rank:
        raise AdapterError(f"tensor {a_key} has rank {rank}, and {CONFIG} says {said:g}; they are of two adapters")
    if rank > LARGEST_RANK:
        raise AdapterError(f"tensor {a_key} has rank {rank}; at most {LARGEST_RANK} is supported")
    if not _is_target(config.get("target_modules"), name):
        raise AdapterError(f"tensor {a_key} is of a module that target_modules of {CONFIG} does not name")
    alpha = _by_pattern(config, "alpha_pattern", "lora_alpha", name)
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return AdapterModule(name, rank, in_features, out_features, scale)


def _by_pattern(config: Mapping[str, Any], patterns: str, otherwise: str, name: str) -> float:
    """A number of one module: of the first pattern that its name ends with, as PEFT reads them, or for all others."""
    chosen = config.get(patterns) or {}
    if not isinstance(chosen, dict):
        raise AdapterError(f"{CONFIG} has {patterns}={chosen!r}; it must be an object")
    key = next((pattern for pattern in chosen if _matches(rf"(.*\.)?({pattern})", name, patterns)), None)
    value = config.get(otherwise, 8) if key is None else chosen[key]  # PEFT's default for both
    if type(value) not in (int, float) or not math.isfinite(value):
        raise AdapterError(f"{CONFIG} has {otherwise if key is None else patterns}={value!r}; it must be a number")
    return value


def _is_target(targets: Any, name: str) -> bool:
    if isinstance(targets, str):
        return targets == "all-linear" or _matches(targets, name, "target_modules")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise AdapterError(f"{CONFIG} has target_modules={str(targets)[:80]}; it must be names or an expression")
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _matches(pattern: str, name: str, setting: str) -> bool:
    """By RE2, in linear time: an expression of Python could hold the interpreter up for hours."""
    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(pattern, options).fullmatch(name) is not None
    except re2.error as error:
        reason = error.args[0].decode("utf-8", "replace") if isinstance(error.args[0], bytes) else error
        raise AdapterError(
            f"{CONFIG} has in {setting} the expression {pattern[:200]!r}, which RE2 does not take: {reason}; "
            "write an expression without looking ahead or back, or names"
        ) from None
