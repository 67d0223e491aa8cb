"""Llama 2 and 3.x: a dense decoder without biases."""

from typing import Any

from engine.token.checkpoint import ModelError
from engine.token.models.dense import DenseConfig


def dense_config(config: dict[str, Any]) -> DenseConfig:
    """config.json of LlamaForCausalLM."""
    refuse_unless(config, hidden_act="silu", attention_bias=False, mlp_bias=False)
    return common(config, qk_norm=False)


def common(config: dict[str, Any], *, qk_norm: bool) -> DenseConfig:
    """The keys that all dense families of this kind share."""
    try:
        heads = config["num_attention_heads"]
        return DenseConfig(
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate_size=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            max_model_len=config["max_position_embeddings"],
            norm_eps=config["rms_norm_eps"],
            tie_embeddings=config.get("tie_word_embeddings", False),
            qk_norm=qk_norm,
            rope=config,
        )
    except KeyError as error:
        raise ModelError(f"config.json lacks {error.args[0]}") from None


def refuse_unless(config: dict[str, Any], **expected: Any) -> None:
    for key, value in expected.items():
        if config.get(key, value) != value:
            raise ModelError(f"config.json has {key}={config[key]!r}; only {value!r} is supported for this family")
