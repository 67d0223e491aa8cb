"""Keys of a GGUF file mean what they mean to llama.cpp, or are refused."""

import math

import pytest
from gguf import GGMLQuantizationType as Kind

from engine.token.checkpoint import read_config
from engine.token.models.rope import rope_frequencies
from metrics.errors import ModelError
from tests.engine.token.gguf.test_gguf import write

YARN = {"type": "yarn", "factor": 4.0, "original_context_length": 64}


def written(checkpoints, path, **keys):
    """The config.json of a llama whose metadata have these keys behind `llama.rope.`."""

    def also(writer):
        for key, value in keys.items():
            add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
            add(f"llama.rope.{key.replace('__', '.')}", value)

    write(checkpoints["llama"], path / "model.gguf", Kind.F32, also=also)
    return read_config(path)


def scaled(checkpoints, path, **keys):
    config = written(checkpoints, path, **{f"scaling__{key}": value for key, value in keys.items()})
    return rope_frequencies(config, 16, 64)


def test_factor_without_a_type_is_linear_as_is_the_older_key(checkpoints, tmp_path):
    folders = [tmp_path / name for name in ("plain", "new", "old", "one", "named none")]
    for folder in folders:
        folder.mkdir()
    plain, _ = scaled(checkpoints, folders[0])
    new, _ = scaled(checkpoints, folders[1], factor=3.0)
    old, _ = rope_frequencies(written(checkpoints, folders[2], scale_linear=3.0), 16, 64)
    one, _ = scaled(checkpoints, folders[3], factor=1.0)
    none, _ = scaled(checkpoints, folders[4], factor=3.0, type="none")
    assert (
        (new * 3 - plain).abs().max() < 1e-7 and (old == new).all() and (one == plain).all() and (none == plain).all()
    )


def test_attention_factor_multiplies_that_of_yarn(checkpoints, tmp_path):
    own = 0.1 * math.log(4.0) + 1
    for name, keys, expected in (
        ("a", {}, own),
        ("b", {"attn_factor": 1 / own}, 1.0),
        ("c", {"attn_factor": 0.5}, own / 2),
    ):
        (tmp_path / name).mkdir()
        assert scaled(checkpoints, tmp_path / name, **YARN, **keys)[1] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"dimension_count": 8}, "rope.dimension_count=8, and heads of"),
        ({"scaling__type": "longrope", "scaling__factor": 2.0}, "rope scaling 'longrope'"),
        ({"scaling__attn_factor": 0.5}, "attn_factor=0.5 without YaRN"),
        ({"scaling__factor": 2.0, "scaling__attn_factor": 0.5}, "attn_factor=0.5 without YaRN"),
        ({"scaling__type": "yarn", "scaling__factor": 2.0, "scaling__yarn_ext_factor": 0.5}, "yarn_ext_factor=0.5"),
    ],
)
def test_key_that_is_not_honoured_is_refused_by_its_name(checkpoints, tmp_path, keys, sentence):
    with pytest.raises(ModelError, match=sentence):
        written(checkpoints, tmp_path, **keys)


def test_rotation_of_whole_heads_may_be_said(checkpoints, tmp_path):
    config = read_config(checkpoints["llama"])
    width = config["hidden_size"] // config["num_attention_heads"]
    assert written(checkpoints, tmp_path, dimension_count=width)["hidden_size"] == config["hidden_size"]


def test_ends_are_those_that_the_file_names_and_known_control_tokens(checkpoints, tmp_path):
    tokens = ["a", "b", "</s>", "<|im_end|>", "<|eot_id|>", "c", "d", "<|end|>"]

    def also(writer):
        writer.add_token_list(tokens)
        writer.add_token_types([1, 1, 3, 3, 1, 3, 3, 3])  # what is no control token ends nothing
        writer.add_eot_token_id(5)
        writer.add_uint32("tokenizer.ggml.eom_token_id", 6)

    write(checkpoints["llama"], tmp_path / "model.gguf", Kind.F32, also=also)
    assert read_config(tmp_path)["eos_token_id"] == [2, 3, 5, 6, 7]
