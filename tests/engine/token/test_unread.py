"""Keys that nothing reads are named, once for each file of a checkpoint; keys that change nothing are not."""

import json
import logging
import shutil
from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from sojourn.engine.config import model_folder
from sojourn.engine.token.checkpoint import read_config
from sojourn.engine.token.models.registry import decoder_config, outlined_model
from sojourn.engine.token.unread import GENERATION, TOKENIZER, unread_keys
from tests.engine.token.gguf.test_gguf import write

QUIET = {
    "tokenizer_config.json": [
        {}, {"model_max_length": 1000000000000000019884624838656, "legacy": False, "image_token": "<image>"},
        {"padding_side": "left", "clean_up_tokenization_spaces": True, "some_switch": False, "other": None},
        *({key: "x"} for key in sorted(TOKENIZER - {"added_tokens_decoder"})),
    ],
    "generation_config.json": [
        {}, {"do_sample": True, "temperature": 0.6, "top_k": 20, "eos_token_id": [1, 2], "transformers_version": "5"},
        {"num_beams": 1, "typical_p": 1.0, "repetition_penalty": 1.0, "guidance_scale": 1.0, "suppress_tokens": []},
        {"renormalize_logits": False, "stop_strings": None, "min_length": 0, "no_repeat_ngram_size": 0},
        *({key: 2} for key in sorted(GENERATION)),
    ],
}  # fmt: skip
LOUD = {
    "tokenizer_config.json": [{"do_lower_case": True}, {"keep_accents": True}, {"new_switch": "on"}],
    "generation_config.json": [
        {"num_beams": 4}, {"stop_strings": ["###"]}, {"suppress_tokens": [3]}, {"begin_suppress_tokens": [1]},
        {"bad_words_ids": [[4]]}, {"forced_bos_token_id": 2}, {"no_repeat_ngram_size": 3}, {"typical_p": 0.9},
        {"epsilon_cutoff": 0.01}, {"eta_cutoff": 0.01}, {"min_new_tokens": 4}, {"min_length": 9}, {"top_h": 0.4},
        {"guidance_scale": 1.5}, {"penalty_alpha": 0.6}, {"sequence_bias": [[[1], 2.0]]}, {"renormalize_logits": True},
        {"exponential_decay_length_penalty": [10, 1.2]}, {"max_time": 3}, {"token_healing": True}, {"brand_new": 1},
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", QUIET)
def test_key_that_changes_nothing_is_not_named(name, tmp_path):
    for said in QUIET[name]:
        (tmp_path / name).write_text(json.dumps(said))
        assert unread_keys(tmp_path) == [], said


@pytest.mark.parametrize(("name", "said"), [(name, said) for name, each in LOUD.items() for said in each])
def test_key_that_nothing_reads_is_named_with_file_and_value(name, said, tmp_path):
    (tmp_path / name).write_text(json.dumps(said))
    (sentence,) = unread_keys(tmp_path)
    ((key, value),) = said.items()
    assert sentence.startswith(f"{name} has {key}={value!r}, which nothing here reads")


def test_tokens_that_tokenizer_json_lacks_are_named(tmp_path):
    shutil.copy(model_folder("tiny-model") / "tokenizer.json", tmp_path)
    named = {"0": {"content": "<|endoftext|>"}, "2560": {"content": "<tool>"}, "2561": {"content": '<"a">'}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": named}))
    (sentence,) = unread_keys(tmp_path)
    assert "tokenizer.json does not have: ['<\"a\">', '<tool>']" in sentence


def test_sentences_are_logged_when_a_model_is_loaded(tmp_path, caplog):
    folder = shutil.copytree(model_folder("tiny-model"), tmp_path / "copy")
    (folder / "generation_config.json").write_text(json.dumps({"num_beams": 4}))
    with caplog.at_level(logging.WARNING):
        outlined_model(folder, torch.float32, torch.device("cpu"), None)
    assert [message for message in caplog.messages if "nothing here reads" in message] == [
        "generation_config.json has num_beams=4, which nothing here reads: if it changes what a model computes, "
        "outputs are wrong"
    ]


@pytest.mark.parametrize("folder", ["tiny-model", "tiny-mixture"])
def test_bundled_checkpoints_have_no_key_that_nothing_reads(folder):
    assert unread_keys(model_folder(folder)) == []


SECTIONS = {
    "rope_parameters": (
        [{"rope_type": "default", "rope_theta": 1e4}, {"rope_type": "yarn", "factor": 2.0, "truncate": False},
         {"rope_type": "linear", "factor": 2.0, "finetuned": True}, {"rope_type": "default", "odd": None}],
        [("llama_4_scaling_beta", 0.1), ("mrope_section", [1, 2]), ("short_factor", [1.0])],
    ),
    "rope_scaling": ([{"type": "linear", "factor": 2.0}], [("extrapolation_factor", 1.0), ("low_frequency", 2)]),
    "quantization_config": (
        [{"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "meta": {"x": {"y": 1}}},
         {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True, "modules_to_not_convert": None},
         {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
         {"quant_method": "compressed-tensors", "kv_cache_scheme": None, "config_groups": {"group_0": {
             "targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "observer": "minmax"}}}}],
        [("kv_cache_scheme", "fp8"), ("kv_cache_quant_algo", "FP8"), ("rotation", True), ("is_marlin_format", True)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SECTIONS)
def test_keys_of_sections_are_named_with_their_path_unless_they_are_read(name, checkpoints, caplog):
    quiet, loud = SECTIONS[name]
    config = read_config(checkpoints["llama"])
    for section in quiet:
        decoder_config(config | {name: section})
        assert not caplog.text, section
    for key, value in loud:
        caplog.clear()
        decoder_config(config | {name: quiet[0] | {key: value}})
        assert f"config.json has {name}.{key}={value!r}, which nothing here reads" in caplog.text


def test_keys_of_a_layer_of_a_section_are_named(checkpoints, caplog):
    groups = {"config_groups": {"group_0": {"weights": {"num_bits": 4, "hadamard": True}}}}
    decoder_config(read_config(checkpoints["llama"]) | {"quantization_config": groups})
    assert "quantization_config.config_groups.group_0.weights.hadamard=True" in caplog.text


def of_file(checkpoints, path: Path, **keys):
    def also(writer: gguf.GGUFWriter):
        for key, value in keys.items():
            add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
            add(key.replace("__", "."), value)

    write(checkpoints["llama"], path / "model.gguf", Kind.F32, also=also)
    return unread_keys(path / "model.gguf")


def test_keys_of_a_gguf_file_are_named_unless_they_are_read_or_change_nothing(checkpoints, tmp_path):
    quiet = {
        "general__name": "x", "general__license": "mit", "general__quantization_version": 2,
        "general__sampling__temp": 0.5, "general__sampling__mirostat": 0, "general__sampling__mirostat_tau": 5.0,
        "quantize__imatrix__file": "x", "llama__vocab_size": 9, "llama__expert_used_count": 0,
        "tokenizer__ggml__add_sep_token": 1, "tokenizer__chat_template__tool_use": "x", "split__count": 1,
    }  # fmt: skip
    assert of_file(checkpoints, tmp_path, **quiet) == []
    loud = {
        "llama__new_scale": 2.0, "llama__attention__key_length_mla": 8, "tokenizer__ggml__normalizer__lowercase": 1,
        "general__sampling__xtc_probability": 0.5, "general__sampling__mirostat": 2, "other__thing": 1,
    }  # fmt: skip
    (sentence,) = of_file(checkpoints, tmp_path, **quiet | loud)
    assert sentence.startswith("model.gguf has general.sampling.mirostat=2, general.sampling.xtc_probability=0.5, ")
    for key, value in loud.items():
        assert f"{key.replace('__', '.')}={value}" in sentence
    assert "license" not in sentence and "add_sep_token" not in sentence
