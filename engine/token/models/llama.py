"""Llama 2 and 3.x, and what the families that follow its layout share with it."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from sojourn.engine.compute.operations.backend import Norm
from sojourn.engine.compute.operations.reference import rms_norm
from sojourn.engine.token.models.grouped import GroupedAttention, GroupedConfig
from sojourn.engine.token.models.layer import DecoderConfig
from sojourn.engine.token.models.mlp import GatedMLP
from sojourn.engine.token.models.rope import length_limits, refuse_odd
from sojourn.engine.token.models.settings import count, number, refuse_unless
from sojourn.metrics.errors import ModelError


def decoder_config(config: dict[str, Any]) -> DecoderConfig:
    """config.json of LlamaForCausalLM."""
    bias = bool(config.get("attention_bias"))
    return grouped_decoder(
        config, gated_mlps(config, bias=bool(config.get("mlp_bias"))), qkv_bias=bias, output_bias=bias
    )


def gated_mlps(config: dict[str, Any], **options: Any) -> tuple[Callable[[], nn.Module], ...]:
    """The same gated feed-forward part in every layer."""
    refuse_unless(config, hidden_act="silu")
    make = partial(GatedMLP, count(config, "hidden_size"), count(config, "intermediate_size"), **options)
    return (make,) * count(config, "num_hidden_layers")


def grouped_decoder(
    config: dict[str, Any],
    mlps: tuple[Callable[[], nn.Module], ...],
    *,
    windows: tuple[int | None, ...] | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_norm: bool = False,
    norm: Norm = rms_norm,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: bool = False,
    **options: Any,
) -> DecoderConfig:
    """A decoder with grouped attention; `options` go to DecoderConfig."""
    hidden_size, heads = count(config, "hidden_size"), count(config, "num_attention_heads")
    kv_heads = count(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelError(f"config.json has {heads} attention heads, which {kv_heads} key and value heads do not divide")
    head_dim = count(config, "head_dim", hidden_size // heads)
    refuse_odd(head_dim)
    eps = number(config, "rms_norm_eps")
    attention = GroupedConfig(
        hidden_size, heads, kv_heads, head_dim, scale or head_dim**-0.5, eps, qkv_bias, output_bias, qk_norm,
        norm=norm, soft_cap=soft_cap, sinks=sinks,
    )  # fmt: skip
    windows = windows or (None,) * len(mlps)
    return rotary_decoder(config, partial(GroupedAttention, attention), mlps, windows=windows, norm=norm, **options)


def rotary_decoder(
    config: dict[str, Any],
    attention: Callable[[int | None], nn.Module],
    mlps: tuple[Callable[[], nn.Module], ...],
    **options: Any,
) -> DecoderConfig:
    """A decoder with rotated positions and RMS norms; `options` go to DecoderConfig."""
    by_default, longest = length_limits(config)
    return DecoderConfig(
        hidden_size=count(config, "hidden_size"),
        vocab_size=count(config, "vocab_size"),
        max_model_len=by_default,
        longest_model_len=longest,
        norm_eps=number(config, "rms_norm_eps"),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention=attention,
        mlps=mlps,
        rope=config,
        **options,
    )
