"""Tiny random checkpoints, as Hugging Face transformers writes them, and transformers itself as the oracle."""

import pytest


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Family → folder: float32, with a spread of weights wide enough that greedy choices are not near ties."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    sizes = dict(
        vocab_size=320, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96, max_position_embeddings=512, initializer_range=0.3, eos_token_id=2, bos_token_id=1,
    )  # fmt: skip
    llama3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
              "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
    root = tmp_path_factory.mktemp("checkpoints")
    families = {
        "llama": (LlamaForCausalLM, LlamaConfig(**sizes, tie_word_embeddings=False)),
        "llama3": (LlamaForCausalLM, LlamaConfig(**sizes, tie_word_embeddings=True, rope_parameters=llama3)),
        "qwen3": (Qwen3ForCausalLM, Qwen3Config(**sizes, head_dim=24, tie_word_embeddings=True)),
    }
    for name, (family, config) in families.items():
        torch.manual_seed(7)
        family(config).eval().save_pretrained(root / name, max_shard_size="100KB")
    return {name: root / name for name in families}


@pytest.fixture(scope="session")
def oracle(checkpoints):
    """(family, prompt ids, number of tokens) → transformers' greedy tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    models = {}

    def greedy(family: str, prompt: list[int], max_tokens: int) -> list[int]:
        if family not in models:
            models[family] = AutoModelForCausalLM.from_pretrained(checkpoints[family], dtype=torch.float32)
        ids = torch.tensor([prompt])
        output = models[family].generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
        return output[0, len(prompt) :].tolist()

    return greedy
