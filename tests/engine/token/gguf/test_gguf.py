"""A GGUF file, as llama.cpp's own package writes it, is the checkpoint of the weights that the package reads there."""

import json
import logging
import re
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Library

from sojourn.engine.config import model_folder
from sojourn.engine.token.checkpoint import read_config, read_json, tokenizer_source
from sojourn.engine.token.gguf.tensors import FORMS
from sojourn.engine.token.models.registry import load_model, outlined_model
from sojourn.engine.token.text.tokenizer import Tokenizer
from sojourn.metrics.errors import ModelError
from tests.engine.harness import generate
from tests.engine.token.quantised.published import matrices

CPU = torch.device("cpu")
PROMPT = list(range(3, 60))


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's convert_hf_to_gguf.py, LlamaModel.permute."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def write(source: Path, path: Path, kind: Kind, others: dict[str, Kind] | None = None, **changed) -> dict:
    """A GGUF file of a checkpoint folder, and the dense weights that it stands for. `others`: kinds of some tensors."""
    config = read_config(source)
    name = config["model_type"]
    writer = gguf.GGUFWriter(path, changed.pop("architecture", name))
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_eos_token_id(2)
    changed.pop("also", lambda _: None)(writer)
    for key, value in changed.items():
        writer.add_uint32(key.replace("__", "."), value)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, name.upper()), config["num_hidden_layers"])
    dense = {}
    for stored_name, tensor in matrices(source).items():
        stem, suffix = stored_name.rsplit(".", 1)
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(stem.rsplit(".", 1)[-1])
        array = tensor.numpy()
        if heads and name == "llama":
            array = permuted(array, config[heads])
        as_kind = next((k for part, k in (others or {}).items() if part in stored_name), kind)
        as_kind = Kind.F32 if array.ndim == 1 else as_kind
        data = quantize(array, as_kind)
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", data, raw_dtype=as_kind)
        back = torch.from_numpy(dequantize(quantize(tensor.numpy(), as_kind), as_kind))
        dense[stored_name] = back.reshape(tensor.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dense


@pytest.mark.parametrize("family", ["llama", "llama3", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.BF16, Kind.F32])
def test_weights_are_those_that_the_package_reads(family, kind, checkpoints, tmp_path):
    if family == "qwen3" and kind in (Kind.Q4_0, Kind.Q8_0):
        pytest.skip("its heads of 24 leave no whole blocks")
    path = tmp_path / "model.gguf"
    dense = write(checkpoints[family], path, kind, {"gate_proj": Kind.Q5_0})
    models = {weights: load_model(path, torch.float32, CPU, None, weights=weights) for weights in (None, "auto")}
    slices = models[None].slices()
    bound = 0 if kind in (Kind.F32, Kind.BF16) else 1e-6
    for name, target in slices.items():
        assert (target - dense[name]).abs().max() <= bound, name
    outline = outlined_model(path, torch.float32, CPU, None, weights="auto")
    assert 0.75 * outline.weight_bytes <= models["auto"].weight_bytes <= 1.6 * outline.weight_bytes


def test_transformers_reads_the_same_model_from_the_file(checkpoints, tmp_path):
    from transformers import AutoModelForCausalLM

    path = tmp_path / "model.gguf"
    write(checkpoints["llama"], path, Kind.Q8_0)
    (ours,), _ = generate(path, [PROMPT], weights="float32")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    ids = torch.tensor([PROMPT])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12,
                            eos_token_id=None, pad_token_id=0)  # fmt: skip
    assert ours == output[0, len(PROMPT) :].tolist()


SIZES = {name: gguf.GGML_QUANT_SIZES[Kind[name]] for name in FORMS}


@settings(max_examples=30)
@given(st.sampled_from(sorted(FORMS)), st.integers(1, 5), st.integers(1, 3), st.integers(0, 2**31))
def test_blocks_of_any_bits_are_dequantised_as_the_package_does(name, rows, blocks, seed):
    _, size = SIZES[name]
    random = np.random.default_rng(seed)
    data = random.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    for begin in {"Q8_0": [0], "Q4_0": [0], "Q4_K": [0, 2], "Q6_K": [208]}[name]:  # float16 of each block: finite, or 0
        scales = random.normal(size=(rows, blocks, 1)).astype(np.float16) * random.integers(0, 4, (rows, blocks, 1))
        data[..., begin : begin + 2] = scales.astype(np.float16).view(np.uint8)
    data = data.reshape(rows, -1)
    matrix = FORMS[name][-1](torch.from_numpy(data))
    matrix.check("x")
    expected = torch.from_numpy(dequantize(data, Kind[name]))
    torch.testing.assert_close(matrix.dequantised(), expected, rtol=2e-6, atol=2e-6 * expected.abs().max().item())
    dtype, bits, group, zeros, _ = FORMS[name]
    assert (matrix.codes.dtype, matrix.bits, matrix.group) == (dtype, bits, group)
    assert (matrix.zeros is not None) == zeros
    least, most = (0, 2**bits - 1) if dtype == torch.uint8 else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    assert least <= matrix.codes.min() and matrix.codes.max() <= most


def test_config_is_that_of_the_checkpoint(checkpoints, tmp_path):
    for family in ("llama", "llama3", "qwen2", "qwen3"):
        folder = tmp_path / family
        folder.mkdir()
        write(checkpoints[family], folder / "model.gguf", Kind.F32)
        ours, theirs = read_config(folder), read_config(checkpoints[family])
        for key in ("architectures", "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers",
                    "num_key_value_heads", "vocab_size", "max_position_embeddings", "tie_word_embeddings",
                    "eos_token_id"):  # fmt: skip
            assert ours[key] == theirs[key], (family, key)
        assert ours["rms_norm_eps"] == pytest.approx(theirs["rms_norm_eps"])
    shutil.copy(checkpoints["qwen3"] / "config.json", folder)
    assert read_config(folder) == read_config(checkpoints["qwen3"])  # that beside the file comes first
    assert "transformers_version" not in read_config(folder / "model.gguf")  # but not where the file itself is named


def llama3_file(checkpoint: Path, folder: Path, factor: float) -> Path:
    """As published Llama 3.1: the divisors of the rotation are a tensor."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = json.loads((checkpoint / "config.json").read_text())
    config["rope_parameters"] |= {"original_max_position_embeddings": 8192, "factor": factor}
    shutil.copytree(checkpoint, folder)
    (folder / "config.json").write_text(json.dumps(config))
    from transformers import LlamaConfig

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**config), "cpu")
    plain = 1 / config["rope_parameters"]["rope_theta"] ** (torch.arange(0, 16, 2) / 16)
    original = gguf.GGUFWriter.write_header_to_file

    def with_divisors(self, *arguments, **named):
        self.add_tensor("rope_freqs.weight", (plain / scaled).numpy().astype(np.float32))
        original(self, *arguments, **named)

    gguf.GGUFWriter.write_header_to_file = with_divisors
    try:
        write(folder, folder / "model.gguf", Kind.F32)
    finally:
        gguf.GGUFWriter.write_header_to_file = original
    return folder


def test_rotation_of_llama_3_is_known_by_its_divisors(checkpoints, tmp_path):
    folder = llama3_file(checkpoints["llama3"], tmp_path / "model", 32.0)
    rope = read_config(folder / "model.gguf")["rope_parameters"]
    assert rope.pop("factor") == pytest.approx(32.0)
    assert rope == {"rope_type": "llama3", "rope_theta": 10000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192}  # fmt: skip


def with_tokenizer(
    path: Path, pre: str = "gpt-2", tokens: list[str] | None = None, model: str = "gpt2", **extra
) -> Path:
    """A file that has a tokenizer and one tensor."""
    source = json.loads((model_folder("tiny-model") / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(path, "qwen3")
    vocabulary = source["model"]["vocab"]
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens or sorted(vocabulary, key=vocabulary.get))
    special = {token["id"] for token in source["added_tokens"]}
    if tokens is None:
        writer.add_token_types([3 if index in special else 1 for index in range(len(vocabulary))])
        writer.add_token_merges([" ".join(merge) for merge in source["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")
    for key, value in extra.items():
        getattr(writer, key)(value)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens or vocabulary), 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


TEXTS = (
    "Hello, world!  It's 12345 o'clock.\n\n\tdef f(x): return x",
    "日本語 and émigré 🙂",
    "<|im_start|>user\nhi<|im_end|>",
)


def test_byte_level_tokenizer_of_the_metadata_is_the_checkpoints(tmp_path):
    path = with_tokenizer(tmp_path / "model.gguf")
    ours, theirs = Tokenizer(path), Tokenizer(model_folder("tiny-model"))
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text), skip_special_tokens=False) == text
    assert ours.stop_token_ids == [0, 2]  # llama.cpp knows <|endoftext|> by its name
    assert read_json(path, "tokenizer_config.json")["chat_template"] == "{{ messages[0].content }}"


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe"])
def test_split_patterns_are_those_that_transformers_has(pre, tmp_path):
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer, get_gguf_tokenizer

    path = with_tokenizer(tmp_path / "model.gguf", pre)
    architecture, tokenizer, _ = get_gguf_tokenizer(path)
    theirs, _ = convert_gguf_tokenizer(architecture, tokenizer)
    for text in TEXTS:
        assert Tokenizer(path).encode(text, add_special_tokens=False) == theirs.encode(text).ids


def test_sentencepiece_tokenizer_is_that_of_transformers(tmp_path):
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer, get_gguf_tokenizer

    pieces = ["▁", "h", "e", "l", "o", "w", "r", "d", "he", "ll", "hell", "hello", "▁hello", "▁w", "or", "▁wor", "ld"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    path = with_tokenizer(
        tmp_path / "model.gguf", tokens=tokens, model="llama", add_token_types=types,
        add_token_scores=[0.0] * 259 + [-float(index) for index in range(len(pieces))], add_unk_token_id=0,
    )  # fmt: skip
    architecture, tokenizer, _ = get_gguf_tokenizer(path)
    theirs, _ = convert_gguf_tokenizer(architecture, tokenizer)
    ours = Library.from_str(tokenizer_source(path))
    for text in ("hello world", "hell o  world", "ä hello"):
        pieces = ours.encode(text, add_special_tokens=False)
        assert pieces.tokens == theirs.encode(text, add_special_tokens=False).tokens
        assert ours.decode(pieces.ids) == text
    assert ours.encode("hello").ids == [0, *ours.encode("hello", add_special_tokens=False).ids]  # begins with BOS


def test_tokenizer_beside_the_file_comes_first_and_one_in_the_file_is_taken_whole(tmp_path):
    path = with_tokenizer(tmp_path / "model.gguf", "unheard-of")
    with pytest.raises(ModelError, match=r"splits texts as 'unheard-of', which is not known; put tokenizer"):
        Tokenizer(path)
    shutil.copy(model_folder("tiny-model") / "tokenizer.json", tmp_path)
    assert Tokenizer(path).encode("Hello") == Tokenizer(tmp_path).encode("Hello") != []


BAD = {
    "another architecture": (dict(architecture="mamba"), "is of the architecture 'mamba'; supported as GGUF are llama"),
    "experts": (dict(llama__expert_count=8), "llama.expert_count=8, which is not supported as GGUF"),
    "other heads": (
        dict(llama__attention__head_count=3),
        "has 3 attention heads, which 2 key",
    ),
    "another size": (dict(llama__embedding_length=128), "has shape"),
}


@pytest.mark.parametrize("name", BAD)
def test_file_of_another_model_is_refused(name, checkpoints, tmp_path, monkeypatch):
    changed, sentence = BAD[name]
    monkeypatch.setattr(gguf.GGUFWriter, "add_key_value", _overwriting)
    write(checkpoints["llama"], tmp_path / "model.gguf", Kind.F32, **changed)
    with pytest.raises(ModelError, match=re.escape(sentence)):
        outlined_model(tmp_path / "model.gguf", torch.float32, CPU, None)


def _overwriting(self, key, value, kind, sub_type=None):
    self.kv_data[0][key] = gguf.gguf_writer.GGUFValue(value=value, type=kind, sub_type=sub_type)


def test_damaged_files_are_refused_in_a_sentence(checkpoints, tmp_path):
    path = tmp_path / "model.gguf"
    write(checkpoints["llama"], path, Kind.Q8_0)
    whole = path.read_bytes()
    damaged = [whole[:-5000], whole[:40], b"", b"GGUF", b"\0" + whole[1:], whole[:8] + b"\xff" * 16 + whole[24:]]
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(ModelError, match=r"model\.gguf"):
            outlined_model(path, torch.float32, CPU, None)


def test_which_file_is_meant(checkpoints, tmp_path):
    write(checkpoints["llama"], tmp_path / "a.gguf", Kind.F32)
    assert read_config(tmp_path)["architectures"] == ["LlamaForCausalLM"]
    shutil.copy(tmp_path / "a.gguf", tmp_path / "b.gguf")
    with pytest.raises(ModelError, match="has 2 GGUF files; give the path"):
        read_config(tmp_path)
    split = tmp_path / "c-00001-of-00002.gguf"
    shutil.copy(tmp_path / "a.gguf", split)
    with pytest.raises(ModelError, match="join the parts"):
        read_config(split)
    with pytest.raises(ModelError, match=r"none\.gguf does not exist"):
        read_config(tmp_path / "none.gguf")
    save_file(load_file(next(checkpoints["llama"].glob("*.safetensors"))), tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"no config\.json"):  # a folder of safetensors is one of safetensors
        read_config(tmp_path)
