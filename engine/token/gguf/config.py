"""What a config.json would say of the model in a GGUF file."""

from typing import Any

import numpy as np

from sojourn.engine.token.gguf.ends import end_tokens, role_id
from sojourn.engine.token.gguf.file import GGUFFile
from sojourn.engine.token.models.settings import number
from sojourn.engine.token.models.yarn import yarn_mscale
from sojourn.metrics.errors import ModelError

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
# Key of the file → key of generation_config.json. The penalty of llama.cpp is of the last `penalty_last_n` tokens, and
# ours of all.
SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
# What other files may say and this engine would compute otherwise.
REFUSED = (
    "expert_count", "attention.sliding_window", "logit_scale", "embedding_scale", "residual_scale", "attention.scale",
    "attention.clamp_kqv", "attention.max_alibi_bias", "attention.temperature_scale", "attn_logit_softcapping",
    "final_logit_softcapping", "rope.dimension_sections", "rope.freq_base_swa", "use_parallel_residual",
)  # fmt: skip
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
    _refuse_other_heads(file, name)
    config = {key: metadata[f"{name}.{ours}"] for ours, key in KEYS.items() if f"{name}.{ours}" in metadata}
    tensors = {tensor.name: tensor for tensor in file.tensors}
    # A null is refused when the model is built: llama.cpp has no defaults of families.
    config = {"max_position_embeddings": None, "rms_norm_eps": None} | config
    config.setdefault("num_key_value_heads", config.get("num_attention_heads"))
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
    if (token := role_id(metadata, "bos")) is not None:
        config["bos_token_id"] = token
    if ends := end_tokens(metadata):
        config["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return config


def generation_config_of(file: GGUFFile) -> dict[str, Any]:
    """The sampling that the file asks for. Its numbers are float32, and mean the decimal that is written shortest."""
    said = {ours: file.metadata[key] for key, ours in SAMPLING.items() if key in file.metadata}
    return {key: float(str(np.float32(value))) if isinstance(value, float) else value for key, value in said.items()}


def _refuse_other_heads(file: GGUFFile, name: str) -> None:
    metadata = file.metadata
    if metadata.get(f"{name}.attention.causal") is False:
        raise ModelError(f"{file.path} has {name}.attention.causal=false; only causal attention is supported")
    rotated = metadata.get(f"{name}.rope.dimension_count")
    width = metadata.get(f"{name}.attention.key_length")
    if width is None and (heads := metadata.get(f"{name}.attention.head_count")) and isinstance(heads, int):
        width = metadata.get(f"{name}.embedding_length", 0) // heads
    if rotated is not None and rotated != width:
        raise ModelError(
            f"{file.path} has {name}.rope.dimension_count={rotated}, and heads of {width}: heads that are rotated in "
            "part are not supported as GGUF"
        )
    values = metadata.get(f"{name}.attention.value_length")
    if values is not None and values != width:
        raise ModelError(
            f"{file.path} has {name}.attention.value_length={values}, and keys of {width}; both must be equal"
        )


def _dtype(kinds: set[str]) -> str:
    """That what is dequantised takes: float16, as the blocks' own scales, unless there is a wider tensor."""
    wider = {"F32": "float32", "BF16": "bfloat16"}
    return next((dtype for kind, dtype in wider.items() if kinds == {kind}), "float16")


def _rope(file: GGUFFile, name: str, tensors: dict) -> dict[str, Any]:
    metadata = file.metadata
    rope = {"rope_type": "default", "rope_theta": number(metadata, f"{name}.rope.freq_base", 10000.0)}
    if "rope_freqs.weight" in tensors:
        return rope | _llama3(file, rope["rope_theta"], np.asarray(tensors["rope_freqs.weight"].data, np.float64))
    scaling = f"{name}.rope.scaling"
    # Files of before rope.scaling have rope.scale_linear; a factor without a type is linear.
    factor = number(metadata, f"{scaling}.factor", number(metadata, f"{name}.rope.scale_linear", 0.0))
    kind = metadata.get(f"{scaling}.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise ModelError(f"{file.path} has rope scaling {kind!r}; supported as GGUF are linear, yarn and llama3")
    sharpness = number(metadata, f"{scaling}.attn_factor", 1.0)
    if kind == "none" or factor in (0.0, 1.0):
        if sharpness != 1.0:
            raise ModelError(f"{file.path} has {scaling}.attn_factor={sharpness} without YaRN, which is not supported")
        return rope
    rope |= {"rope_type": kind, "factor": factor}
    if kind == "linear" and sharpness != 1.0:
        raise ModelError(f"{file.path} has {scaling}.attn_factor={sharpness} without YaRN, which is not supported")
    if kind == "yarn":
        if original := metadata.get(f"{scaling}.original_context_length"):
            rope["original_max_position_embeddings"] = original
        rope["attention_factor"] = sharpness * yarn_mscale(factor)  # as llama.cpp multiplies
        for key in ("beta_fast", "beta_slow"):
            if f"{scaling}.yarn_{key}" in metadata:
                rope[key] = number(metadata, f"{scaling}.yarn_{key}")
        for key in ("yarn_ext_factor", "yarn_log_multiplier", "yarn_attn_factor"):
            if metadata.get(f"{scaling}.{key}") not in (None, 1.0, -1.0, 0.0):
                raise ModelError(
                    f"{file.path} has {scaling}.{key}={metadata[f'{scaling}.{key}']}, which is not supported"
                )
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
