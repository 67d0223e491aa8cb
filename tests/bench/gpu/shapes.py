"""A shape whose dry run sees what Qwen3-0.6B has not: groups of four query heads, and a mixture of experts."""

from bench.shapes import SHAPES

MIXTURE = SHAPES["small"] | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 256, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [0],
}  # fmt: skip
