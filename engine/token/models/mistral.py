"""Mistral: Llama's layout, every layer with a sliding window where config.json has one.

Mixtral has a mixture of experts in every layer instead.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from sojourn.engine.token.models.layer import DecoderConfig
from sojourn.engine.token.models.llama import gated_mlps, grouped_decoder
from sojourn.engine.token.models.moe import MixtureOfExperts, softmax_top_k, split_experts
from sojourn.engine.token.models.settings import count, expert_counts, layer_windows, refuse_unless

RENAMED = {".block_sparse_moe.": ".mlp.", ".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}


def decoder_config(config: dict[str, Any]) -> DecoderConfig:
    """config.json of MistralForCausalLM."""
    refuse_unless(config, attention_bias=False, mlp_bias=False, layer_types=None)
    mlps = gated_mlps(config)
    windows = layer_windows({"sliding_window": 4096} | config, len(mlps))  # null has none, absent has the first one's
    return grouped_decoder(config, mlps, windows=windows)


def mixtral_config(config: dict[str, Any]) -> DecoderConfig:
    """config.json of MixtralForCausalLM."""
    refuse_unless(config, hidden_act="silu", attention_bias=False, layer_types=None)
    num_layers = count(config, "num_hidden_layers")
    hidden_size, intermediate_size = count(config, "hidden_size"), count(config, "intermediate_size")
    num_experts, chosen = expert_counts(config, "num_local_experts")
    route = partial(softmax_top_k, num_chosen=chosen, normalise=True)
    mixture = partial(MixtureOfExperts, hidden_size, intermediate_size, num_experts, chosen, route)
    windows = layer_windows(config, num_layers)
    return grouped_decoder({"rope_theta": 1e6} | config, (mixture,) * num_layers, windows=windows, translate=_translate)


def _translate(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    for published, ours in RENAMED.items():
        name = name.replace(published, ours)
    return split_experts(name, tensor)
