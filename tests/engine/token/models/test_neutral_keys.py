"""A key that other families compute with is refused, but for the value that changes nothing."""

import logging

import pytest

from sojourn.engine.token.checkpoint import read_config
from sojourn.engine.token.models.keys import INERT
from sojourn.engine.token.models.registry import decoder_config
from sojourn.metrics.errors import ModelError
from tests.engine.families import FAMILIES

# Read by a mechanism of their own: as sizes, positions or refusals.
NOT_OF_ANY_VALUE = {
    "architectures", "vocab_size", "max_position_embeddings", "original_max_position_embeddings", "rope_theta",
    "rope_scaling", "rope_parameters", "tie_word_embeddings", "is_encoder_decoder", "partial_rotary_factor",
    "logit_scale", "final_logit_softcapping", "attn_logit_softcapping",
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_no_key_that_transformers_writes_is_unknown(family, checkpoints, caplog):
    with caplog.at_level(logging.WARNING):
        decoder_config(read_config(checkpoints[family]))
    assert not [record for record in caplog.records if record.name.startswith("engine")]  # transformers warns, too


@pytest.mark.parametrize("key", sorted(INERT - NOT_OF_ANY_VALUE))
def test_inert_key_changes_nothing_and_is_not_named(key, checkpoints, caplog):
    config = read_config(checkpoints["llama"])
    plain = decoder_config(config)
    with caplog.at_level(logging.WARNING):
        parts = decoder_config(config | {key: 7})
    assert not caplog.text
    for name in ("hidden_size", "vocab_size", "max_model_len", "norm_eps", "tie_embeddings", "windows", "logit_cap"):
        assert getattr(parts, name) == getattr(plain, name), name


@pytest.mark.parametrize(
    ("key", "value", "neutral"),
    [
        ("embedding_multiplier", 12.0, 1.0), ("residual_multiplier", 0.2, 1.0), ("logits_scaling", 8.0, 1.0),
        ("attention_multiplier", 0.1, None), ("logit_scale", 0.06, None), ("final_logit_softcapping", 30.0, None),
        ("attn_logit_softcapping", 50.0, None), ("partial_rotary_factor", 0.5, 1.0), ("rotary_pct", 0.25, 1.0),
        ("query_pre_attn_scalar", 64, None), ("no_rope_layers", [0, 1], None), ("attention_chunk_size", 64, None),
        ("alibi", True, False), ("is_encoder_decoder", True, False), ("hidden_act", "gelu", "silu"),
    ],
)  # fmt: skip
def test_key_that_other_families_compute_with_is_refused_unless_it_changes_nothing(key, value, neutral, checkpoints):
    config = read_config(checkpoints["llama"])
    decoder_config(config | {key: neutral})
    with pytest.raises(ModelError, match=key):
        decoder_config(config | {key: value})


def test_sliding_layers_without_sliding_windows_are_refused(checkpoints):
    config = read_config(checkpoints["qwen2"]) | {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9}
    with pytest.raises(ModelError, match="sliding_attention"):
        decoder_config(config)
