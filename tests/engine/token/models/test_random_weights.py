"""A config.json alone gives a model of random weights: the same at every start, and usable with token ids."""

import json
import math
from pathlib import Path

import pytest
import torch

from sojourn.engine import LLM, SamplingParams
from sojourn.engine.token.models.registry import load_model
from sojourn.metrics.errors import ModelError

CPU = torch.device("cpu")
MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 8000, "hidden_size": 32, "intermediate_size": 48,
    "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "rope_theta": 10_000,
}  # fmt: skip
DENSE = {key: value for key, value in MIXTURE.items() if "expert" not in key}
DENSE["architectures"] = ["Qwen3ForCausalLM"]


def config_alone(folder: Path, config: dict) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("config", [DENSE, MIXTURE], ids=["dense", "mixture"])
def test_random_weights_need_only_a_config_and_are_the_same_again(tmp_path, config):
    folder = config_alone(tmp_path, config)
    first, second = (load_model(folder, torch.float32, CPU, 64, load_format="dummy") for _ in range(2))
    for (name, one), other in zip(first.named_parameters(), second.parameters(), strict=True):
        assert one.isfinite().all() and torch.equal(one, other), name
        assert one.std() > 0.01 if one.dim() > 1 else (one == (0 if "bias" in name else 1)).all(), name
    with pytest.raises(ModelError, match="safetensors"):
        load_model(folder, torch.float32, CPU, 64)


def test_a_config_alone_generates_from_ids_and_refuses_texts(tmp_path):
    with LLM(config_alone(tmp_path, DENSE), load_format="dummy", threads=1) as llm:
        sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=0)
        outputs = llm.generate([[5, 6, 7], [7999] * 20], sampling)
        with pytest.raises(ModelError, match=r"no tokenizer\.json"):
            llm.generate("a text", sampling)
    for output in outputs:
        assert len(output.token_ids) == 6 and output.text == "" and output.finish_reason == "length"
        assert all(math.isfinite(token.logprob) for token in output.logprobs)
