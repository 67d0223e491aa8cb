"""Gemma: norms that store their weight less one, scaled embeddings, a GELU gate.

Gemma 2 (Gemma Team, 2024) and 3 (2025) put a norm behind attention and feed-forward part, too, and give most layers a
window. Gemma 2 caps its logits. Gemma 3 normalises queries and keys, and has two bases of rotation.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from sojourn.engine.compute.operations.reference import gelu_gate, gemma_rms_norm
from sojourn.engine.token.models.layer import DecoderConfig
from sojourn.engine.token.models.llama import grouped_decoder
from sojourn.engine.token.models.mlp import GatedMLP
from sojourn.engine.token.models.settings import count, layer_windows, number, refuse_unless, section
from sojourn.metrics.errors import ModelError

LEAST = 1e-3  # of what is divided by


# What transformers takes an absent key for: configs of checkpoints that read images leave out most of them.
COMMON = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256, "sliding_window": 4096,
}  # fmt: skip
GEMMA2 = COMMON | {"vocab_size": 256_000, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0,
                   "final_logit_softcapping": 30.0}  # fmt: skip
GEMMA3 = COMMON | {"vocab_size": 262_208, "max_position_embeddings": 131_072, "rope_theta": 1e6,
                   "rope_local_base_freq": 1e4, "sliding_window_pattern": 6}  # fmt: skip
IMAGE_PARTS = ("vision_tower.", "multi_modal_projector.")


def decoder_config(config: dict[str, Any]) -> DecoderConfig:
    """config.json of GemmaForCausalLM. Early ones say `gelu` and mean its tanh approximation, as transformers does."""
    for key in ("hidden_act", "hidden_activation"):  # transformers has read either, at different times
        if config.get(key) not in (None, "gelu"):
            refuse_unless(config, **{key: "gelu_pytorch_tanh"})
    return _decoder({"tie_word_embeddings": True, "head_dim": 256} | config)


def gemma2_config(config: dict[str, Any]) -> DecoderConfig:
    """config.json of Gemma2ForCausalLM."""
    return _two_norms(GEMMA2 | config, pattern=2)


def gemma3_config(config: dict[str, Any]) -> DecoderConfig:
    """config.json of Gemma3ForCausalLM, and of Gemma3ForConditionalGeneration, whose language part alone is read."""
    config = GEMMA3 | config
    by_type = section(config, "rope_parameters")  # of each kind of layer; older configs have three keys
    whole, windows = section(by_type, "full_attention"), section(by_type, "sliding_attention")
    if not by_type:
        whole, windows = section(config, "rope_scaling"), {}
    elif not whole and not windows:
        raise ModelError("config.json has rope_parameters for all layers; this family has them for each kind of layer")
    whole = {"rope_theta": config["rope_theta"]} | whole
    windows = {"rope_theta": config["rope_local_base_freq"]} | windows
    return _two_norms(
        config | {"rope_parameters": whole, "rope_scaling": None},
        pattern=count(config, "sliding_window_pattern"),
        qk_norm=True,
        window_rope=config | {"rope_parameters": windows, "rope_scaling": None},
        translate=_text_part,
    )


def _two_norms(config: dict[str, Any], *, pattern: int, **options: Any) -> DecoderConfig:
    """Without `layer_types`, every layer but each `pattern`-th has a window."""
    refuse_unless(config, hidden_activation="gelu_pytorch_tanh")
    num_layers = count(config, "num_hidden_layers")
    if config.get("layer_types") is None:
        kinds = ["sliding_attention" if (index + 1) % pattern else "full_attention" for index in range(num_layers)]
        config = config | {"layer_types": kinds}
    return _decoder(
        config,
        windows=layer_windows(config, num_layers),
        scale=number(config, "query_pre_attn_scalar", least=LEAST) ** -0.5,
        soft_cap=_cap(config, "attn_logit_softcapping"),
        logit_cap=_cap(config, "final_logit_softcapping"),
        output_norms=True,
        **options,
    )


def _cap(config: dict[str, Any], key: str) -> float | None:
    return None if config.get(key) is None else number(config, key, least=LEAST)


def _decoder(config: dict[str, Any], **options: Any) -> DecoderConfig:
    refuse_unless(config, attention_bias=False)
    if config.get("use_bidirectional_attention"):
        raise ModelError("config.json has use_bidirectional_attention; only causal attention is supported")
    hidden_size = count(config, "hidden_size")
    mlp = partial(GatedMLP, hidden_size, count(config, "intermediate_size"), gate=gelu_gate)
    mlps = (mlp,) * count(config, "num_hidden_layers")
    return grouped_decoder(config, mlps, norm=gemma_rms_norm, embedding_scale=hidden_size**0.5, **options)


def _text_part(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The language part of a model that reads images: published ones have it in front, transformers 5 within."""
    name = name.removeprefix("language_model.").replace("model.language_model.", "model.")
    if not name.removeprefix("model.").startswith(IMAGE_PARTS):
        yield name, tensor
