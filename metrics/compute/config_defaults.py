"""What a config.json means where it lacks a key: the default of the family's configuration class in transformers. Sizes
that say which model it is have none here: without them a checkpoint is refused."""

from typing import Any


def _usual(positions: int, kv_heads: int | None = None, eps: float = 1e-6, **more: Any) -> dict[str, Any]:
    heads = {} if kv_heads is None else {"num_key_value_heads": kv_heads}
    return {"rms_norm_eps": eps, "max_position_embeddings": positions} | heads | more


_LATENT = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_GEMMA3 = _usual(131_072, 4)
DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": _usual(2048),  # each head has keys and values of its own
    "MistralForCausalLM": _usual(131_072, 8),
    "MixtralForCausalLM": _usual(131_072, 8, 1e-5, num_experts_per_tok=2, num_local_experts=8),
    "Qwen2ForCausalLM": _usual(32_768, 32),
    "Qwen3ForCausalLM": _usual(32_768, 32),
    "Qwen3MoeForCausalLM": _usual(32_768, 4, num_experts_per_tok=8, moe_intermediate_size=768),
    "GemmaForCausalLM": _usual(8192, 16),
    "Gemma2ForCausalLM": _usual(8192, 4),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "GptOssForCausalLM": _usual(131_072, 8, 1e-5, num_experts_per_tok=4, num_local_experts=128),
    "DeepseekV2ForCausalLM": _LATENT | _usual(2048, n_shared_experts=2, n_routed_experts=64),
    "DeepseekV3ForCausalLM": _LATENT | _usual(
        4096, n_shared_experts=1, n_routed_experts=256, num_experts_per_tok=8, first_k_dense_replace=3,
        routed_scaling_factor=2.5, n_group=8, topk_group=4,
    ),
    "MptForCausalLM": {"max_seq_len": 2048},
    "MPTForCausalLM": {"max_seq_len": 2048},
}  # fmt: skip


def completed(config: dict[str, Any]) -> dict[str, Any]:
    """With the defaults of keys that are absent. A null stays: it is a value of its own."""
    return DEFAULTS.get(config["architectures"][0], {}) | config
