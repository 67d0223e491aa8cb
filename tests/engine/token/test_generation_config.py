"""The sampling that a checkpoint asks for: which keys count, what they may be, and how they reach offline use."""

import json
import shutil

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from sojourn.engine import LLM, SamplingParams
from sojourn.engine.config import model_folder
from sojourn.engine.token.generation_config import SamplingDefaults, sampling_defaults
from sojourn.engine.token.gguf.config import generation_config_of
from sojourn.engine.token.gguf.file import GGUFFile
from sojourn.metrics.errors import ModelError
from tests.engine.token.gguf.test_gguf import write


def said(folder, content):
    (folder / "generation_config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return sampling_defaults(folder)


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ({}, {}),
        ({"temperature": None, "top_k": None, "max_new_tokens": None}, {}),
        ({"do_sample": True, "eos_token_id": 2, "transformers_version": "4.51.0"}, {}),
        ({"do_sample": False, "temperature": 0.3}, {"temperature": 0.3}),
        ({"temperature": 1}, {"temperature": 1.0}),
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"temperature": 0.0, "top_p": 0}, {"temperature": 0.0, "top_p": 0.0}),
        ({"top_k": 20.0}, {"top_k": 20}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 0}, {"top_k": 0}),
        ({"min_p": 0.02, "repetition_penalty": 1.05}, {"min_p": 0.02, "repetition_penalty": 1.05}),
        ({"max_new_tokens": 2048, "max_length": 20}, {"max_tokens": 2048}),
        ({"temperature": 0.6, "top_k": 20, "top_p": 0.95}, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
    ],
)
def test_keys_that_count_are_those_that_vllm_takes(tmp_path, content, shown):
    assert said(tmp_path, content).shown == shown
    assert sampling_defaults(tmp_path, "none") == SamplingDefaults()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", "0.7"), ("temperature", -0.1), ("temperature", 3), ("temperature", True),
        ("temperature", [0.7]), ("temperature", {}), ("temperature", float("nan")), ("temperature", float("inf")),
        ("top_p", 1.5), ("top_p", -1), ("top_k", 2.5), ("top_k", -2), ("top_k", "50"), ("top_k", 2**40),
        ("min_p", 2), ("min_p", float("nan")), ("repetition_penalty", 0), ("repetition_penalty", -1.1),
        ("repetition_penalty", 1e9), ("max_new_tokens", 0), ("max_new_tokens", -1), ("max_new_tokens", 1.5),
        ("max_new_tokens", float("inf")), ("max_new_tokens", True),
    ],
)  # fmt: skip
def test_value_that_no_request_may_have_is_refused_with_file_key_and_way_out(tmp_path, key, value):
    with pytest.raises(ModelError) as refusal:
        said(tmp_path, {key: value})
    sentence = str(refusal.value)
    assert "generation_config.json has " + key in sentence and "set generation_config=none" in sentence
    assert sampling_defaults(tmp_path, "none").shown == {}


@pytest.mark.parametrize("content", ["[]", "{", "1", '{"temperature": 0.5'])
def test_file_that_is_no_object_is_named(tmp_path, content):
    with pytest.raises(ModelError, match=r"generation_config\.json is not"):
        said(tmp_path, content)


def test_older_checkpoints_say_it_in_config_json_which_the_newer_file_hides(tmp_path):
    (tmp_path / "config.json").write_text('{"temperature": 0.4, "top_k": 9, "repetition_penalty": null}')
    assert sampling_defaults(tmp_path).shown == {"temperature": 0.4, "top_k": 9}
    assert "of config.json" in sampling_defaults(tmp_path).sentence()
    assert said(tmp_path, {"top_p": 0.5}).shown == {"top_p": 0.5}
    assert said(tmp_path, {}).shown == {}
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text('{"top_p": "high"}')
    with pytest.raises(ModelError, match=r"config\.json has top_p='high'; it must be a number from 0 to 1"):
        sampling_defaults(tmp_path)


def test_sentence_of_the_start_names_values_file_and_switch(tmp_path):
    assert said(tmp_path, {}).sentence() is None
    sentence = said(tmp_path, {"temperature": 0.7, "top_k": 40, "max_new_tokens": 99}).sentence()
    assert "temperature=0.7, top_k=40, max_tokens=99 of generation_config.json" in sentence
    assert "generation_config=none" in sentence


def test_keys_of_a_gguf_file_are_those_that_llama_cpp_reads(tmp_path):
    metadata = {
        "general.sampling.temp": float(np.float32(0.6)), "general.sampling.top_p": float(np.float32(0.95)),
        "general.sampling.top_k": 20, "general.sampling.min_p": 0.0,
        "general.sampling.penalty_repeat": float(np.float32(1.05)), "general.sampling.xtc_threshold": 0.1,
    }  # fmt: skip
    assert generation_config_of(GGUFFile(tmp_path, metadata, ())) == {
        "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.05,
    }  # fmt: skip


def test_sampling_of_a_gguf_file_is_taken_and_a_file_beside_it_hides_it(checkpoints, tmp_path):
    def also(writer):
        writer.add_float32("general.sampling.temp", 0.6)
        writer.add_int32("general.sampling.top_k", -1)

    path = tmp_path / "model.gguf"
    write(checkpoints["llama"], path, Kind.F32, also=also)
    for named in (path, tmp_path):
        assert sampling_defaults(named).shown == {"temperature": 0.6, "top_k": 0}
        assert "of model.gguf" in sampling_defaults(named).sentence()
        assert sampling_defaults(named, "none").shown == {}
    assert said(tmp_path, {"top_p": 0.5}).shown == {"top_p": 0.5} == sampling_defaults(path).shown


def test_value_of_a_gguf_file_is_named_by_its_own_key(checkpoints, tmp_path):
    path = tmp_path / "model.gguf"
    bad = ("general.sampling.penalty_repeat", -1.5)
    write(checkpoints["llama"], path, Kind.F32, also=lambda writer: writer.add_float32(*bad))
    with pytest.raises(ModelError, match=r"model\.gguf has general\.sampling\.penalty_repeat=-1\.5; it must be a num"):
        sampling_defaults(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = shutil.copytree(model_folder("tiny-model"), tmp_path_factory.mktemp("own") / "model")
    values = {"temperature": 0.0, "top_p": 0, "top_k": 3, "repetition_penalty": 1.5, "max_new_tokens": 6}
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def test_offline_use_without_sampling_is_sampled_as_the_checkpoint_says(folder):
    own = SamplingParams(max_tokens=6, temperature=0.0, top_k=3, repetition_penalty=1.5)
    with LLM(folder, num_kv_blocks=64) as llm:
        taken, same = llm.generate("The queue is"), llm.generate("The queue is", own)
        assert taken[0].token_ids == same[0].token_ids and len(taken[0].token_ids) <= 6
        longer = llm.default_sampling(max_tokens=9, repetition_penalty=1.0)
        assert (longer.max_tokens, longer.repetition_penalty, longer.temperature, longer.top_k) == (9, 1.0, 0.0, 3)
        assert 0 < longer.top_p < 1e-6
        ids = [5] * 1022
        assert len(llm.generate([ids])[0].token_ids) <= 2  # as much as fits
        assert llm.generate(["The queue is"], n=2)[1].token_ids == taken[0].token_ids
    with LLM(folder, num_kv_blocks=64, generation_config="none") as llm:
        assert llm.default_sampling() == SamplingParams(max_tokens=16)
