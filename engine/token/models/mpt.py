"""MPT: no rotation but a bias by distance (ALiBi), layer norms, and a plain feed-forward part."""

import math
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from sojourn.engine.compute.operations.reference import layer_norm
from sojourn.engine.token.models.grouped import GroupedAttention, GroupedConfig
from sojourn.engine.token.models.layer import DecoderConfig
from sojourn.engine.token.models.mlp import PlainMLP
from sojourn.engine.token.models.settings import count, number, refuse_unless, section
from sojourn.metrics.errors import ModelError

RENAMED = {
    "transformer.wte.": "model.embed_tokens.",
    "transformer.norm_f.": "model.norm.",
    ".norm_1.": ".input_layernorm.",
    ".norm_2.": ".post_attention_layernorm.",
    ".attn.out_proj.": ".self_attn.o_proj.",
    ".ffn.": ".mlp.",
}


def decoder_config(config: dict[str, Any]) -> DecoderConfig:
    """config.json of MptForCausalLM."""
    refuse_unless(config, no_bias=True)
    if config.get("norm_type", "low_precision_layernorm") not in ("layernorm", "low_precision_layernorm"):
        raise ModelError(f"config.json has norm_type={config['norm_type']!r}; only layer norms are supported here")
    attention = section(config, "attn_config")
    refuse_unless(attention, attn_type="multihead_attention", prefix_lm=False, qk_ln=False, alibi=True)
    hidden_size, heads = count(config, "d_model"), count(config, "n_heads")
    if hidden_size % heads:
        raise ModelError(f"config.json has d_model={hidden_size}, which n_heads={heads} does not divide")
    eps = number(config, "layer_norm_epsilon", 1e-5)
    head_dim, num_layers = hidden_size // heads, count(config, "n_layers")
    grouped = GroupedConfig(
        hidden_size, heads, heads, head_dim,
        scale=number(attention, "softmax_scale", head_dim**-0.5),
        norm_eps=eps,
        clip=number(attention, "clip_qkv") if attention.get("clip_qkv") else None,
        alibi_slopes=alibi_slopes(heads, count(attention, "alibi_bias_max", 8)),
    )  # fmt: skip
    mlp = partial(PlainMLP, hidden_size, count(config, "expansion_ratio", 4) * hidden_size)
    longest = count(config, "max_seq_len")
    return DecoderConfig(
        hidden_size=hidden_size,
        vocab_size=count(config, "vocab_size"),
        max_model_len=longest,
        longest_model_len=longest,
        norm_eps=eps,
        tie_embeddings=bool(config.get("tie_word_embeddings", True)),
        attention=partial(GroupedAttention, grouped),
        windows=(None,) * num_layers,
        mlps=(mlp,) * num_layers,
        norm=layer_norm,
        translate=_translate,
    )


def alibi_slopes(num_heads: int, bias_max: int = 8) -> tuple[float, ...]:
    """A geometric series that ends at 2 ** -bias_max. For a number of heads that is no power of two: of the series for
    the next one every second, then the others (Press et al., 2022; MPT's order)."""
    whole = 2 ** math.ceil(math.log2(num_heads))
    series = [2.0 ** (-bias_max * i / whole) for i in range(1, whole + 1)]
    return tuple(series if whole == num_heads else (series[1::2] + series[::2])[:num_heads])


def _translate(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    for published, ours in RENAMED.items():
        name = name.replace(published, ours)
    name = re.sub(r"^transformer\.blocks\.", "model.layers.", name)
    if name.endswith(".attn.Wqkv.weight"):
        for part, rows in zip("qkv", tensor.tensor_split(3), strict=True):
            yield name.replace(".attn.Wqkv.", f".self_attn.{part}_proj."), rows
    else:
        yield name, tensor
