"""What a config.json would say of the model in a GGUF file."""

from typing import Any

import numpy as np

from engine.token.gguf.file import GGUFFile
from engine.token.models.settings import number
from metrics.errors import ModelError

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# Key of the metadata, behind the architecture's name → key of config.json.
KEYS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
}
# What other files may say and this engine would compute otherwise.
REFUSED = ("expert_count", "attention.sliding_window", "logit_scale", "embedding_scale", "attention.scale")
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip


def config_of(file: GGUFFile) -> dict[str, Any]:
    """Raises ModelError for an architecture that is not mapped, and for settings that are not honoured."""
    metadata = file.metadata
    name = metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise ModelError(f"{file.path} is of the architecture {name!r}; supported as GGUF are {supported}")
    for key in REFUSED:
        if metadata.get(f"{name}.{key}"):
            raise ModelError(
                f"{file.path} has {name}.{key}={metadata[f'{name}.{key}']}, which is not supported as GGUF"
            )
    config = {key: metadata[f"{name}.{ours}"] for ours, key in KEYS.items() if f"{name}.{ours}" in metadata}
    tensors = {tensor.name: tensor for tensor in file.tensors}
    if "token_embd.weight" not in tensors:
        raise ModelError(f"{file.path} lacks the tensor token_embd.weight; it is no language model, or a part of one")
    for key, value in config.items():
        if isinstance(value, list):
            raise ModelError(f"{file.path} has another {key} in each layer, which is not supported")
    config |= {
        "architectures": [ARCHITECTURES[name]],
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "hidden_act": "silu",
        "torch_dtype": _dtype({tensor.kind for tensor in file.tensors if len(tensor.shape) > 1}),
        "rope_parameters": _rope(file, name, tensors),
    }
    for role in ("bos", "eos"):
        if (token := metadata.get(f"tokenizer.ggml.{role}_token_id")) is not None:
            config[f"{role}_token_id"] = token
    return config


def _dtype(kinds: set[str]) -> str:
    """That what is dequantised takes: float16, as the blocks' own scales, unless there is a wider tensor."""
    wider = {"F32": "float32", "BF16": "bfloat16"}
    return next((dtype for kind, dtype in wider.items() if kinds == {kind}), "float16")


def _rope(file: GGUFFile, name: str, tensors: dict) -> dict[str, Any]:
    metadata = file.metadata
    rope = {"rope_type": "default", "rope_theta": number(metadata, f"{name}.rope.freq_base", 10000.0)}
    if "rope_freqs.weight" in tensors:
        return rope | _llama3(file, rope["rope_theta"], np.asarray(tensors["rope_freqs.weight"].data, np.float64))
    kind = metadata.get(f"{name}.rope.scaling.type", "none")
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{file.path} has rope scaling {kind!r}; supported as GGUF are linear, yarn and llama3")
    rope |= {"rope_type": kind, "factor": number(metadata, f"{name}.rope.scaling.factor")}
    if kind == "yarn" and (original := metadata.get(f"{name}.rope.scaling.original_context_length")):
        rope["original_max_position_embeddings"] = original
    return rope


def _llama3(file: GGUFFile, theta: float, divisors: np.ndarray) -> dict[str, Any]:
    """The scaling whose divisors the file has instead of its settings: those of Llama 3.1 and later, of any factor."""
    scaling = LLAMA3 | {"factor": float(divisors.max())}
    wavelengths = 2 * np.pi * theta ** (np.arange(len(divisors)) / len(divisors))
    original, low, high = (scaling[key] for key in
                           ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"))  # fmt: skip
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    if not np.allclose(divisors, expected, rtol=1e-3):
        raise ModelError(f"{file.path} scales rotations as no known model does; put the model's config.json beside it")
    return scaling
