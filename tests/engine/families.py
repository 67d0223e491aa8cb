"""Tiny random checkpoints of every family and rope, as Hugging Face transformers writes them."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

SIZES = dict(
    vocab_size=320, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=96, max_position_embeddings=512, initializer_range=0.3, eos_token_id=2, bos_token_id=1,
)  # fmt: skip
THETA = {"rope_theta": 10000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64} | THETA  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64} | THETA
EXPERTS = dict(moe_intermediate_size=32, num_experts_per_tok=3, decoder_sparse_step=1)
LATENT = dict(
    num_key_value_heads=4, kv_lora_rank=24, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=20, n_routed_experts=8,
    num_experts_per_tok=3, moe_intermediate_size=32, first_k_dense_replace=1,
)  # fmt: skip

# name → (class of transformers, what it differs in from SIZES)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_hidden_layers": 3, "tie_word_embeddings": False}),
    "llama3": ("Llama", {"num_hidden_layers": 3, "tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "qwen3": ("Qwen3", {"num_hidden_layers": 3, "head_dim": 24, "tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "llama-one-kv-head": ("Llama", {"num_key_value_heads": 1, "head_dim": 12}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0} | THETA}),
    "llama-dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0} | THETA}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "qwen2-yarn-tuned": ("Qwen2", {"rope_parameters": YARN | {
        "attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}}),
    "mistral": ("Mistral", {"sliding_window": 23}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen3-windows": ("Qwen3", {"use_sliding_window": True, "sliding_window": 33, "max_window_layers": 1,
                                "attention_bias": True}),
    "gemma": ("Gemma", {"head_dim": 24, "num_key_value_heads": 1}),
    "gemma2": ("Gemma2", {"head_dim": 24, "sliding_window": 19, "query_pre_attn_scalar": 20, "num_hidden_layers": 3,
                          "attn_logit_softcapping": 8.0, "final_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3Text", {"head_dim": 24, "sliding_window": 19, "query_pre_attn_scalar": 20,
                              "num_hidden_layers": 3, "rope_parameters": {
                                  "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0},
                                  "sliding_attention": {"rope_type": "default"} | THETA},
                              "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "gpt-oss": ("GptOss", {
        "head_dim": 24, "sliding_window": 21, "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 64,
        "num_hidden_layers": 3, "initializer_range": 0.25, "rope_parameters": YARN | {"truncate": False}}),
    "mixtral": ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 40}),
    "qwen3-moe": ("Qwen3Moe", EXPERTS | {"num_experts": 8, "norm_topk_prob": True, "head_dim": 24}),
    "qwen3-moe-some-layers": ("Qwen3Moe", EXPERTS | {
        "num_experts": 8, "norm_topk_prob": False, "num_hidden_layers": 4, "decoder_sparse_step": 2,
        "mlp_only_layers": [3], "head_dim": 16}),
    "deepseek-v2-lite": ("DeepseekV2", LATENT | {
        "q_lora_rank": None, "topk_method": "greedy", "n_shared_experts": 2, "routed_scaling_factor": 1.0,
        "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}}),
    "deepseek-v2": ("DeepseekV2", LATENT | {
        "q_lora_rank": 40, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "n_shared_experts": 1,
        "routed_scaling_factor": 4.0}),
    "deepseek-v3": ("DeepseekV3", LATENT | {
        "q_lora_rank": 40, "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "routed_scaling_factor": 2.5,
        "norm_topk_prob": True, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    "deepseek-v3-other": ("DeepseekV3", LATENT | {
        "q_lora_rank": 40, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "routed_scaling_factor": 1.5,
        "norm_topk_prob": False, "attention_bias": True, "rope_interleave": False,
        "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}}),
    "mpt": ("Mpt", {"n_heads": 4, "attn_config": {"clip_qkv": 2.0}}),
    "mpt-six-heads": ("Mpt", {"n_heads": 6, "d_model": 72, "attn_config": {"softmax_scale": 0.2}}),
}  # fmt: skip
MPT_SIZES = dict(
    vocab_size=320, d_model=64, n_layers=2, max_seq_len=512, initializer_range=0.3, eos_token_id=2, bos_token_id=1
)


def random_model(name: str, **changes: Any):
    """The model of transformers: float32, with weights spread wide enough that greedy choices are not near ties, and
    biases and norms that are not what they start as, so that forgetting one would show. `changes` are of its config."""
    import torch
    import transformers

    family, differences = FAMILIES[name]
    sizes = MPT_SIZES if family == "Mpt" else SIZES
    config = getattr(transformers, f"{family}Config")(**(sizes | differences | changes))
    torch.manual_seed(7)
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in (*model.named_parameters(), *model.named_buffers()):
            if parameter_name.endswith("e_score_correction_bias"):
                parameter.uniform_(-0.3, 0.3)
            elif parameter_name.endswith("_proj_bias"):  # of all experts
                parameter.normal_(0.0, 0.3)
            elif parameter.dim() == 1 and "rotary" not in parameter_name:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


class Checkpoints(Mapping):
    """Name → folder, written when it is first asked for."""

    def __init__(self, root: Path, write: Callable[[str, Path], None]):
        self._root, self._write = root, write

    def __getitem__(self, name: str) -> Path:
        folder = self._root / name
        if not folder.exists():
            self._write(name, folder)
        return folder

    def __iter__(self) -> Iterator[str]:
        return iter(FAMILIES)

    def __len__(self) -> int:
        return len(FAMILIES)
