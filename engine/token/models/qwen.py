"""Qwen2 and 2.5: Llama's layout with biases on queries, keys and values, and sliding windows in the upper layers.

Qwen3 has a norm on each query and key head instead, and is dense or has a mixture of experts.
"""

from functools import partial
from typing import Any

from sojourn.engine.token.models.layer import DecoderConfig
from sojourn.engine.token.models.llama import gated_mlps, grouped_decoder
from sojourn.engine.token.models.moe import MixtureOfExperts, softmax_top_k, split_experts
from sojourn.engine.token.models.settings import count, expert_counts, layer_windows, listed


def qwen2_config(config: dict[str, Any]) -> DecoderConfig:
    """config.json of Qwen2ForCausalLM."""
    mlps = gated_mlps(config)
    return grouped_decoder(config, mlps, windows=_upper_windows(config, len(mlps)), qkv_bias=True)


def qwen3_config(config: dict[str, Any]) -> DecoderConfig:
    """config.json of Qwen3ForCausalLM."""
    mlps, bias = gated_mlps(config), bool(config.get("attention_bias"))
    windows = _upper_windows(config, len(mlps))
    return grouped_decoder(
        {"head_dim": 128} | config, mlps, windows=windows, qk_norm=True, qkv_bias=bias, output_bias=bias
    )


def qwen3_moe_config(config: dict[str, Any]) -> DecoderConfig:
    """config.json of Qwen3MoeForCausalLM: every `decoder_sparse_step`-th layer is a mixture, but `mlp_only_layers`."""
    dense, bias = gated_mlps(config), bool(config.get("attention_bias"))
    # transformers 5 writes the other name
    num_experts, chosen = expert_counts(config, "num_experts", config.get("num_local_experts"))
    route = partial(softmax_top_k, num_chosen=chosen, normalise=bool(config.get("norm_topk_prob")))
    hidden_size, intermediate_size = count(config, "hidden_size"), count(config, "moe_intermediate_size")
    mixture = partial(MixtureOfExperts, hidden_size, intermediate_size, num_experts, chosen, route)
    every, only_dense = count(config, "decoder_sparse_step", 1), listed(config, "mlp_only_layers")
    mlps = tuple(dense[index] if index in only_dense or (index + 1) % every else mixture for index in range(len(dense)))
    sliding = config.get("use_sliding_window", False)
    windows = layer_windows(config, len(mlps)) if sliding else (None,) * len(mlps)  # all layers: none are "upper" here
    return grouped_decoder(
        config, mlps, windows=windows, qk_norm=True, qkv_bias=bias, output_bias=bias, translate=split_experts
    )


def _upper_windows(config: dict[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Windows from `max_window_layers` on, where `use_sliding_window` asks for them."""
    if not config.get("use_sliding_window", False):
        return layer_windows(config | {"sliding_window": None}, num_layers)
    return layer_windows(config, num_layers, first=count(config, "max_window_layers", 28, least=0))
