"""Gemma, the first generation: norms that store their weight less one, scaled embeddings, a GELU gate."""

from functools import partial
from typing import Any

from engine.compute.operations.reference import gelu_gate, gemma_rms_norm
from engine.token.models.decoder import DecoderConfig
from engine.token.models.llama import grouped_decoder
from engine.token.models.mlp import GatedMLP
from engine.token.models.settings import count, refuse_unless
from metrics.errors import ModelError


def decoder_config(config: dict[str, Any]) -> DecoderConfig:
    """config.json of GemmaForCausalLM. Early ones say `gelu` and mean its tanh approximation, as transformers does."""
    for key in ("hidden_act", "hidden_activation"):  # transformers has read either, at different times
        if config.get(key) not in (None, "gelu"):
            refuse_unless(config, **{key: "gelu_pytorch_tanh"})
    refuse_unless(config, attention_bias=False)
    if config.get("use_bidirectional_attention"):
        raise ModelError("config.json has use_bidirectional_attention; only causal attention is supported")
    hidden_size = count(config, "hidden_size")
    mlp = partial(GatedMLP, hidden_size, count(config, "intermediate_size"), gate=gelu_gate)
    return grouped_decoder(
        {"tie_word_embeddings": True, "head_dim": 256} | config,
        (mlp,) * count(config, "num_hidden_layers"),
        norm=gemma_rms_norm,
        embedding_scale=hidden_size**0.5,
    )
