"""Shapes whose dry runs see what Qwen3-0.6B has not."""

from bench.shapes import SHAPES

# Groups of four query heads, and a mixture of experts.
MIXTURE = SHAPES["small"] | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 256, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [0],
}  # fmt: skip

# Latent attention, whose prompts are expanded; and sink logits, windows and experts with biases.
LATENT = {
    "architectures": ["DeepseekV2ForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-6, "vocab_size": 4096,
    "hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 16,
    "intermediate_size": 1024, "moe_intermediate_size": 128, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "q_lora_rank": None, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}  # fmt: skip
SINKS = {
    "architectures": ["GptOssForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5, "vocab_size": 4096,
    "hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64,
    "intermediate_size": 256, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 128,
    "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip
