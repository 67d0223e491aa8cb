"""Built from their published config.json, the models have the sizes that their authors and the hub tell."""

import pytest
import torch

from sojourn.engine.token.models.decoder import Decoder
from sojourn.engine.token.models.registry import decoder_config

YARN = dict(type="yarn", factor=40, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1)
LATENT = dict(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, moe_layer_freq=1,
              max_position_embeddings=163840)  # fmt: skip
HEADS_32_8 = dict(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
                  intermediate_size=14336)  # fmt: skip

# name, config.json, parameters, parameters that a token is multiplied by, KV bytes of a token in bfloat16, longest
PUBLISHED = [
    ("Llama-3.1-8B", dict(
        HEADS_32_8, architectures=["LlamaForCausalLM"], vocab_size=128256, max_position_embeddings=131072,
        rope_theta=5e5, rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                          original_max_position_embeddings=8192)),
     8_030_261_248, 7.5e9, 128 * 1024, 131072),
    ("Mistral-7B-v0.1", dict(
        HEADS_32_8, architectures=["MistralForCausalLM"], vocab_size=32000, max_position_embeddings=32768,
        sliding_window=4096),
     7_241_732_096, 7.1e9, 128 * 1024, 32768),
    ("Qwen2.5-7B", dict(
        architectures=["Qwen2ForCausalLM"], hidden_size=3584, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, intermediate_size=18944, vocab_size=152064, max_position_embeddings=131072,
        use_sliding_window=False, sliding_window=131072, max_window_layers=28),
     7_615_616_512, 7.07e9, 56 * 1024, 131072),
    ("Qwen3-0.6B", dict(
        architectures=["Qwen3ForCausalLM"], hidden_size=1024, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, intermediate_size=3072, vocab_size=151936, tie_word_embeddings=True,
        max_position_embeddings=40960),
     596_049_920, 0.596e9, 112 * 1024, 40960),
    ("Mixtral-8x7B-v0.1", dict(
        HEADS_32_8, architectures=["MixtralForCausalLM"], vocab_size=32000, max_position_embeddings=32768,
        num_local_experts=8, num_experts_per_tok=2, sliding_window=None),
     46_702_792_704, 12.7e9, 128 * 1024, 32768),
    ("Qwen3-30B-A3B", dict(
        architectures=["Qwen3MoeForCausalLM"], hidden_size=2048, num_hidden_layers=48, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, intermediate_size=6144, moe_intermediate_size=768, num_experts=128,
        num_experts_per_tok=8, norm_topk_prob=True, vocab_size=151936, max_position_embeddings=40960),
     30_532_122_624, 3.04e9, 96 * 1024, 40960),
    ("DeepSeek-V2-Lite", dict(
        LATENT, architectures=["DeepseekV2ForCausalLM"], hidden_size=2048, num_hidden_layers=27, num_attention_heads=16,
        intermediate_size=10944, moe_intermediate_size=1408, n_routed_experts=64, n_shared_experts=2,
        num_experts_per_tok=6, first_k_dense_replace=1, q_lora_rank=None, vocab_size=102400, topk_method="greedy",
        n_group=1, topk_group=1, scoring_func="softmax", norm_topk_prob=False, routed_scaling_factor=1.0,
        rope_scaling=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}),
     15_706_484_224, 2.45e9, 27 * 576 * 2, 163840),
    ("DeepSeek-V3", dict(
        LATENT, architectures=["DeepseekV3ForCausalLM"], hidden_size=7168, num_hidden_layers=61,
        num_attention_heads=128, intermediate_size=18432, moe_intermediate_size=2048, n_routed_experts=256,
        n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=3, q_lora_rank=1536, vocab_size=129280,
        topk_method="noaux_tc", n_group=8, topk_group=4, scoring_func="sigmoid", norm_topk_prob=True,
        routed_scaling_factor=2.5, rope_scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}),
     671_026_419_200, 36.6e9, 61 * 576 * 2, 163840),
    ("mpt-7b", dict(
        architectures=["MPTForCausalLM"], d_model=4096, n_heads=32, n_layers=32, expansion_ratio=4, max_seq_len=2048,
        vocab_size=50432, no_bias=True, norm_type="low_precision_layernorm", logit_scale=None,
        attn_config=dict(alibi=True, alibi_bias_max=8, attn_type="multihead_attention", prefix_lm=False, qk_ln=False,
                         clip_qkv=None, softmax_scale=None)),
     6_649_286_656, 6.65e9, 512 * 1024, 2048),
    ("gemma-2b", dict(
        architectures=["GemmaForCausalLM"], hidden_act="gelu", hidden_size=2048, num_hidden_layers=18,
        num_attention_heads=8, num_key_value_heads=1, head_dim=256, intermediate_size=16384, vocab_size=256000,
        max_position_embeddings=8192),
     2_506_172_416, 2.5e9, 18 * 1024, 8192),
    ("gemma-2-2b", dict(
        architectures=["Gemma2ForCausalLM"], attn_logit_softcapping=50.0, final_logit_softcapping=30.0, head_dim=256,
        hidden_act="gelu_pytorch_tanh", hidden_size=2304, intermediate_size=9216, max_position_embeddings=8192,
        num_attention_heads=8, num_hidden_layers=26, num_key_value_heads=4, query_pre_attn_scalar=256,
        rms_norm_eps=1e-6, rope_theta=1e4, sliding_window=4096, vocab_size=256000),
     2_614_341_888, 2.61e9, 104 * 1024, 8192),
    ("gpt-oss-20b", dict(
        architectures=["GptOssForCausalLM"], attention_bias=True, experts_per_token=4, head_dim=64, hidden_size=2880,
        initial_context_length=4096, intermediate_size=2880, max_position_embeddings=131072, num_attention_heads=64,
        num_experts_per_tok=4, num_hidden_layers=24, num_key_value_heads=8, num_local_experts=32, rope_scaling=YARN | {
            "factor": 32.0, "truncate": False}, rope_theta=150000, sliding_window=128, swiglu_limit=7.0,
        tie_word_embeddings=False, vocab_size=201088),
     20_914_757_184, 3.6e9, 48 * 1024, 131072),
    ("gemma-3-1b", dict(
        architectures=["Gemma3ForCausalLM"], attn_logit_softcapping=None, final_logit_softcapping=None, head_dim=256,
        hidden_size=1152, intermediate_size=6912, max_position_embeddings=32768, num_attention_heads=4,
        num_hidden_layers=26, num_key_value_heads=1, query_pre_attn_scalar=256, rope_local_base_freq=10000,
        rope_scaling=None, rope_theta=1000000, sliding_window=512, sliding_window_pattern=6, vocab_size=262144),
     999_885_952, 1e9, 26 * 1024, 32768),
]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "parameters", "active", "kv_bytes", "longest"),
    [row[1:] for row in PUBLISHED],
    ids=[row[0] for row in PUBLISHED],
)
def test_model_has_its_published_size(config, parameters, active, kv_bytes, longest):
    decoder = decoder_config({"hidden_act": "silu", "rms_norm_eps": 1e-5} | config)
    with torch.device("meta"):
        model = Decoder(decoder).to(torch.bfloat16)
    shape = model.shape()
    assert sum(p.numel() for p in model.parameters()) == parameters
    head = shape.hidden_size * shape.vocab_size
    assert shape.attention_parameters + shape.mlp_parameters + head == pytest.approx(active, rel=0.01)
    assert shape.kv_bytes_per_token == kv_bytes
    assert decoder.max_model_len == longest
