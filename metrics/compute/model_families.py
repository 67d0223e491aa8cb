"""What the families of decoders have beside their matrices, and how a config.json says which family it is of."""

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from sojourn.metrics.compute.config_defaults import DEFAULTS
from sojourn.metrics.errors import ModelError


class Family(NamedTuple):
    """Everything is of one layer."""

    gated: bool = True  # a feed-forward part has three matrices, else two
    norms: int = 2
    norm_bias: bool = False
    query_bias: bool | None = False  # of queries, keys and values; None: as `attention_bias` says
    output_bias: bool | None = False
    mlp_bias: bool | None = False
    query_norm: Literal["", "head", "all"] = ""  # of queries and keys: of a head's size, or of all heads'
    sinks: bool = False  # a logit of each head
    expert_bias: bool = False
    correction: bool = False  # a bias of the router that only takes part in the choice
    shared_gate: bool = False  # of the shared experts: as many weights as the hidden size
    positions: int | None = None  # rows of a learned table of positions beyond the context; None: no table
    defaults: Mapping[str, Any] = {}


_LLAMA = Family(query_bias=None, output_bias=None, mlp_bias=None)
_QWEN2 = Family(query_bias=True, defaults={"use_sliding_window": False})
_QWEN3 = Family(query_bias=None, output_bias=None, query_norm="head", defaults={"use_sliding_window": False})
_DEEPSEEK = Family(output_bias=None)
_BIASED = Family(
    gated=False, norm_bias=True, query_bias=True, output_bias=True, mlp_bias=True, positions=0,
    defaults={"tie_word_embeddings": True},
)  # fmt: skip
_GEMMA = {"tie_word_embeddings": True, "head_dim": 256}
_GEMMA2 = _GEMMA | {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "sliding_window": 4096,
}  # fmt: skip
FAMILIES = {  # by model_type, without `_text`
    "llama": _LLAMA, "mistral": Family(), "mixtral": Family(), "phi3": Family(), "granite": _LLAMA, "smollm3": _LLAMA,
    "qwen2": _QWEN2, "qwen2_vl": _QWEN2, "qwen2_5_vl": _QWEN2, "qwen2_moe": _QWEN2._replace(shared_gate=True),
    "qwen3": _QWEN3, "qwen3_vl": _QWEN3, "qwen3_moe": _QWEN3, "qwen3_vl_moe": _QWEN3,
    "gemma": Family(defaults=_GEMMA), "gemma2": Family(norms=4, defaults=_GEMMA2 | {"vocab_size": 256_000}),
    "gemma3": Family(norms=4, query_norm="head", defaults=_GEMMA2 | {"vocab_size": 262_208}),
    "gpt_oss": Family(
        query_bias=True, output_bias=True, sinks=True, expert_bias=True,
        defaults={"head_dim": 64, "sliding_window": 128},
    ),
    "deepseek_v2": _DEEPSEEK, "deepseek_v3": _DEEPSEEK._replace(correction=True),
    "kimi_k2": _DEEPSEEK._replace(correction=True),
    "glm4": Family(norms=4, query_bias=None), "glm4_moe": Family(query_bias=None, correction=True),
    "llama4": Family(), "minimax_m2": Family(query_norm="all", correction=True), "mimo": Family(query_bias=True),
    "olmo2": Family(query_norm="all"), "opt": _BIASED._replace(positions=2), "gpt2": _BIASED,
    "mpt": Family(gated=False, defaults={"tie_word_embeddings": True}),
}  # fmt: skip
NAMES = {  # of older configs → the usual one
    "n_embd": "hidden_size", "d_model": "hidden_size", "n_layer": "num_hidden_layers", "n_layers": "num_hidden_layers",
    "n_head": "num_attention_heads", "n_heads": "num_attention_heads", "n_positions": "max_position_embeddings",
    "max_seq_len": "max_position_embeddings", "ffn_dim": "intermediate_size", "n_inner": "intermediate_size",
}  # fmt: skip
OF_ALL_PARTS = ("torch_dtype", "dtype", "quantization_config", "tie_word_embeddings")  # may stand beside `text_config`
# Keys with which a layer is another one than its family's: their values that change nothing.
UNCOUNTED: dict[str, tuple[Any, ...]] = {
    "index_topk": (None, 0), "block_configs": (None,), "num_kv_shared_layers": (None, 0),
    "attention_k_eq_v": (None, False), "hidden_size_per_layer_input": (None, 0), "cross_attention_layers": (None, []),
    "is_encoder_decoder": (None, False), "compress_ratios": (None,), "do_layer_norm_before": (None, True),
}  # fmt: skip


def family_of(config: Mapping[str, Any]) -> tuple[str, Family]:
    """Raises ModelError, which names those that are known."""
    architecture = next(iter(config.get("architectures") or ()), "")
    asked = [str(config.get("model_type") or "").removesuffix("_text").replace("-", "_"), kind_of(str(architecture))]
    for name in asked:
        if name in FAMILIES:
            return name, FAMILIES[name]
    said = architecture or config.get("model_type") or "none"
    raise ModelError(f"architecture {said} is not known here; known are {', '.join(sorted(FAMILIES))}")


def kind_of(architecture: str) -> str:
    """Qwen3MoeForCausalLM → qwen3_moe."""
    stem = re.sub(r"(For(CausalLM|ConditionalGeneration)|LMHeadModel)$", "", architecture)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", stem).lower()


def completed_text(whole: Mapping[str, Any]) -> dict[str, Any]:
    """The language part of a config.json under the usual names, with the defaults of its family. Raises ModelError for
    a part that changes its counts and is not counted here."""
    text = whole.get("text_config") or whole.get("language_config") or whole
    if not isinstance(text, Mapping):
        raise ModelError("config.json has a text_config that is no object")
    outer = {key: whole[key] for key in OF_ALL_PARTS if whole.get(key) is not None}
    config = {**outer, **{NAMES.get(key, key): value for key, value in text.items()}}
    config.setdefault("architectures", whole.get("architectures"))
    config.setdefault("model_type", whole.get("model_type"))
    name, family = family_of(config)
    defaults = {kind_of(architecture): found for architecture, found in DEFAULTS.items()}.get(name, {})
    found = {**{NAMES.get(key, key): value for key, value in defaults.items()}, **family.defaults, **config}
    found["model_type"] = name
    for key, neutral in UNCOUNTED.items():
        if found.get(key) not in neutral:
            raise ModelError(f"config.json has {key}, which changes its layers, and no formula here counts that")
    return found
