"""Qwen3 dense: Llama's layout with a norm on each query and key head, and a head size of its own."""

from typing import Any

from engine.token.models.dense import DenseConfig
from engine.token.models.llama import common, refuse_unless


def dense_config(config: dict[str, Any]) -> DenseConfig:
    """config.json of Qwen3ForCausalLM."""
    refuse_unless(config, hidden_act="silu", attention_bias=False, use_sliding_window=False)
    return common(config, qk_norm=True)
