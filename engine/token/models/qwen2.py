"""Qwen2 and 2.5: Llama's layout with biases on queries, keys and values, and sliding windows in the upper layers."""

from typing import Any

from engine.token.models.decoder import DecoderConfig
from engine.token.models.llama import gated_mlps, grouped_decoder
from engine.token.models.settings import count, layer_windows


def decoder_config(config: dict[str, Any]) -> DecoderConfig:
    """config.json of Qwen2ForCausalLM."""
    mlps = gated_mlps(config)
    return grouped_decoder(config, mlps, windows=upper_windows(config, len(mlps)), qkv_bias=True)


def upper_windows(config: dict[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Windows from `max_window_layers` on, where `use_sliding_window` asks for them."""
    if not config.get("use_sliding_window", False):
        return (None,) * num_layers
    return layer_windows(config, num_layers, first=count(config, "max_window_layers", 28, least=0))
