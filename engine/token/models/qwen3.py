"""Qwen3: Llama's layout with a norm on each query and key head, dense or with a mixture of experts."""

from functools import partial
from typing import Any

from engine.token.models.decoder import DecoderConfig
from engine.token.models.llama import gated_mlps, grouped_decoder
from engine.token.models.moe import MixtureOfExperts, softmax_top_k, split_experts
from engine.token.models.qwen2 import upper_windows
from engine.token.models.settings import count, expert_counts, layer_windows, listed


def decoder_config(config: dict[str, Any]) -> DecoderConfig:
    """config.json of Qwen3ForCausalLM."""
    mlps, bias = gated_mlps(config), bool(config.get("attention_bias"))
    windows = upper_windows(config, len(mlps))
    return grouped_decoder(
        {"head_dim": 128} | config, mlps, windows=windows, qk_norm=True, qkv_bias=bias, output_bias=bias
    )


def moe_config(config: dict[str, Any]) -> DecoderConfig:
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
