"""Mistral: Llama's layout, every layer with a sliding window where config.json has one."""

from typing import Any

from engine.token.models.decoder import DecoderConfig
from engine.token.models.llama import gated_mlps, grouped_decoder
from engine.token.models.settings import layer_windows, refuse_unless


def decoder_config(config: dict[str, Any]) -> DecoderConfig:
    """config.json of MistralForCausalLM."""
    refuse_unless(config, attention_bias=False, mlp_bias=False, layer_types=None)
    mlps = gated_mlps(config)
    windows = layer_windows({"sliding_window": 4096} | config, len(mlps))  # null has none, absent has the first one's
    return grouped_decoder(config, mlps, windows=windows)
