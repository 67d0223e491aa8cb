"""Metadata of a GGUF file mean what llama.cpp takes them for, or are refused in a sentence."""

import math
from pathlib import Path

import numpy as np
import pytest

from sojourn.engine.token.gguf.config import config_of
from sojourn.engine.token.gguf.file import GGUFFile, GGUFTensor
from sojourn.engine.token.models.registry import decoder_config
from sojourn.metrics.errors import ModelError

SIZES = {"embedding_length": 64, "attention.head_count": 2, "attention.key_length": 32}


def config(tokens: tuple[str, ...] = (), architecture: str = "llama", **named) -> dict:
    """Keys with `__` for a point; those of the tokenizer have `ggml__` in front."""
    metadata = {"general.architecture": architecture, "tokenizer.ggml.tokens": list(tokens)}
    metadata["tokenizer.ggml.token_type"] = [1] * len(tokens)  # llama.cpp looks at the names alone
    metadata |= {f"{architecture}.{key}": value for key, value in SIZES.items()}
    for name, value in named.items():
        key = name.replace("__", ".")
        metadata[f"tokenizer.{key}" if key.startswith("ggml.") else f"{architecture}.{key}"] = value
    embedding = GGUFTensor("token_embd.weight", "F32", (40, 64), np.zeros((40, 64), np.float32))
    return config_of(GGUFFile(Path("m.gguf"), metadata, (embedding,)))


DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "attention_factor": 0.1 * math.log(4) + 1}
ROPES = [
    ({}, DEFAULT),
    ({"rope__scaling__factor": 3.0}, LINEAR),
    ({"rope__scale_linear": 3.0}, LINEAR),
    ({"rope__scaling__factor": 3.0, "rope__scale_linear": 5.0}, LINEAR),
    ({"rope__scaling__factor": 0.0}, DEFAULT),
    ({"rope__scaling__type": "none", "rope__scaling__factor": 3.0}, DEFAULT),
    ({"rope__scaling__type": "linear", "rope__scaling__factor": 3.0}, LINEAR),
    ({"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}, YARN),
    ({"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 32},
     YARN | {"original_max_position_embeddings": 32}),
    ({"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__attn_factor": 2.0},
     YARN | {"attention_factor": 2 * (0.1 * math.log(4) + 1)}),
    ({"rope__dimension_count": 32, "attention__value_length": 32}, DEFAULT),
]  # fmt: skip


@pytest.mark.parametrize(("metadata", "expected"), ROPES)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_rotation_is_the_one_that_llama_cpp_computes(architecture, metadata, expected):
    assert config(architecture=architecture, **metadata)["rope_parameters"] == expected


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope__dimension_count", 16), ("attention__value_length", 16), ("attention__causal", False),
        ("rope__scaling__attn_factor", 2.0), ("attention__scale", 0.1), ("logit_scale", 0.5),
        ("embedding_scale", 12.0), ("residual_scale", 0.2), ("final_logit_softcapping", 30.0),
        ("attn_logit_softcapping", 50.0), ("rope__dimension_sections", [1, 2]), ("rope__freq_base_swa", 1e4),
        ("attention__sliding_window", 128), ("expert_count", 8), ("attention__clamp_kqv", 8.0),
        ("attention__max_alibi_bias", 8.0),
    ],
)  # fmt: skip
def test_key_that_would_change_a_number_is_refused_by_its_name(key, value):
    with pytest.raises(ModelError, match=key.replace("__", ".")):
        config(**{key: value})


@pytest.mark.parametrize(
    ("scaling", "sentence"),
    [
        ({"type": "longrope", "factor": 2.0}, "rope scaling 'longrope'"),
        ({"factor": 2.0, "attn_factor": 0.5}, "attn_factor=0.5 without YaRN"),
        ({"type": "yarn", "factor": 2.0, "yarn_ext_factor": 0.5}, "yarn_ext_factor=0.5"),
    ],
)
def test_scaling_that_is_not_computed_is_refused(scaling, sentence):
    with pytest.raises(ModelError, match=sentence):
        config(**{f"rope__scaling__{key}": value for key, value in scaling.items()})


ENDS = [
    ({"ggml__eos_token_id": 2}, (), 2),
    ({"ggml__eos_token_id": 2, "ggml__eot_token_id": 5}, (), [2, 5]),
    ({"ggml__eos_token_id": 2, "ggml__eot_token_id": 5, "ggml__eom_token_id": 6}, (), [2, 5, 6]),
    ({"ggml__eos_token_id": 2, "ggml__eot_token_id": 2}, (), 2),
    ({"ggml__eos_token_id": 0}, ("</s>", "a", "<|im_end|>"), [0, 2]),
    ({"ggml__eom_token_id": 1}, (), 1),
    ({"ggml__eos_token_id": 0}, ("a", "</s>", "<|eot_id|>", "[EOS]", "<turn|>"), [0, 1, 2, 3, 4]),
    ({"ggml__eos_token_id": 0, "ggml__model": "llama"}, ("a", "b"), 0),
    ({"ggml__model": "llama"}, ("<unk>", "<s>", "</s>"), 2),
    ({"ggml__eos_token_id": 0}, ("a", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|fim_prefix|>"), [0, 1, 2, 3]),
    ({"ggml__eos_token_id": 0, "ggml__fim_pad_token_id": 2}, ("a", "<|fim_pad|>", "b"), [0, 2]),
    ({"ggml__eos_token_id": 0}, ("<|return|>", "<|end|>", "<|call|>"), [0, 2]),
    ({"ggml__eos_token_id": 0}, ("<|return|>", "<|end|>"), [0, 1]),
    ({"ggml__eos_token_id": 0}, ("<|calls|>", "<|end|>", "<|flush|>"), [0, 2]),
    ({"ggml__eos_token_id": 0}, ("<eos>", "<|tool_response>", "</s>"), [0, 1]),
]


@pytest.mark.parametrize(("metadata", "tokens", "expected"), ENDS)
def test_ends_of_text_turn_and_message_end_an_output(metadata, tokens, expected):
    assert config(tokens, **metadata)["eos_token_id"] == expected


@pytest.mark.parametrize("key", ["max_position_embeddings", "rms_norm_eps"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_file_without_what_llama_cpp_needs_is_refused_and_has_no_default_of_its_family(key, architecture):
    said = config(architecture=architecture) | {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1}
    complete = said | {"max_position_embeddings": 512, "rms_norm_eps": 1e-5}
    assert said[key] is None and decoder_config(complete).hidden_size == 64
    with pytest.raises(ModelError, match=f"lacks {key}"):
        decoder_config(complete | {key: None})


def test_turns_of_yarn_are_the_files_and_heads_without_a_number_of_keys_have_their_own():
    scaling = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    said = config(**scaling, rope__scaling__yarn_beta_fast=16.0, rope__scaling__yarn_beta_slow=2.0)
    assert said["rope_parameters"] == YARN | {"beta_fast": 16.0, "beta_slow": 2.0}
    assert said["num_key_value_heads"] == 2 and config(attention__head_count_kv=1)["num_key_value_heads"] == 1
