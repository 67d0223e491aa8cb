"""Files of a checkpoint that say different things are read as transformers reads them, and none hides another."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sojourn.engine.config import model_folder
from sojourn.engine.sampling import Grammar
from sojourn.engine.techniques.grammar.grammar import GrammarCompiler
from sojourn.engine.token.checkpoint import read_config
from sojourn.engine.token.models.registry import decoder_config, load_model, warn_once
from sojourn.engine.token.text.tokenizer import Tokenizer
from sojourn.metrics.errors import ModelError
from tests.engine.harness import generate

PROMPT = list(range(3, 60))


def copied(checkpoints, tmp_path, family="llama", **config):
    folder = shutil.copytree(checkpoints[family], tmp_path / "copy")
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | config))
    return folder


def check_tokens(folder):
    """Ours are those of transformers, greedily."""
    ours = generate(folder, [PROMPT], 6)[0]
    ids = torch.tensor([PROMPT])
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6, eos_token_id=None, pad_token_id=0
    )  # fmt: skip
    assert ours[0] == theirs[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("is_own", [True, False])
def test_head_of_its_own_counts_though_config_json_ties_it(checkpoints, tmp_path, is_own):
    folder = copied(checkpoints, tmp_path, tie_word_embeddings=True)
    tensors = {}
    for shard in folder.glob("*.safetensors*"):
        tensors |= load_file(shard) if shard.suffix == ".safetensors" else {}
        shard.unlink()
    head = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"] = head + torch.randn_like(head) if is_own else head
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model = load_model(folder, torch.float32, torch.device("cpu"), None)
    assert torch.equal(model.slices()["lm_head.weight"], tensors["lm_head.weight"]) if is_own else (
        "lm_head.weight" not in model.slices() or torch.equal(model.slices()["lm_head.weight"], head)
    )  # fmt: skip
    check_tokens(folder)


def test_rope_scaling_counts_before_rope_parameters(checkpoints, tmp_path):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    folder = copied(checkpoints, tmp_path, rope_scaling=yarn)
    assert "rope_parameters" in json.loads((folder / "config.json").read_text())
    check_tokens(folder)


def ends(folder, config=None, generation=None, tokenizer=None):
    said = json.loads((folder / "config.json").read_text()) | {"eos_token_id": config}
    (folder / "config.json").write_text(json.dumps(said))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": tokenizer}))
    return Tokenizer(folder).stop_token_ids


def test_ends_are_the_union_of_all_files_and_null_hides_none(tmp_path):
    folder = shutil.copytree(model_folder("tiny-model"), tmp_path / "copy")
    name = next(iter(Tokenizer(folder).added_tokens))
    end = Tokenizer(folder).added_tokens[name]
    others = sorted({5, 6, 7} - {end})
    assert ends(folder, 5, None, None) == [5] and ends(folder, None, 5, None) == [5]
    assert ends(folder, None, None, name) == [end] == ends(folder, None, None, {"content": name})
    assert ends(folder, others[:1], others[1:], name) == sorted({*others, end})
    assert ends(folder, None, None, "no such token") == []
    assert ends(folder, 10**9, None, None) == []  # the model draws no such id
    for odd in ("5", True, [None], 1.5):
        with pytest.raises(ModelError, match=r"config\.json has eos_token_id"):
            ends(folder, odd)


@pytest.mark.parametrize(
    ("listed", "says"), [([2, 10**9], "they end no text"), (10**9, "and nothing else does"), (2, None)]
)  # fmt: skip
def test_ends_outside_of_the_vocabulary_are_told(tmp_path, caplog, listed, says):
    ends(shutil.copytree(model_folder("tiny-model"), tmp_path / "copy"), listed)
    told = [record.getMessage() for record in caplog.records]
    assert told == [] if says is None else says in told[0]


def test_tokenizer_with_more_ids_than_the_model_follows_grammars(tmp_path):
    folder = shutil.copytree(model_folder("tiny-model"), tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    compiler = GrammarCompiler(folder, config["vocab_size"] - 3)  # logits of three ids fewer
    guide = compiler.compile(Grammar("regex", "[ab]{2}"))
    for token in Tokenizer(folder).encode("ab", add_special_tokens=False):
        guide.consume(token, [])
    assert guide.may_end and guide.error is None


def said_of(config, caplog):
    caplog.clear()
    warn_once.cache_clear()
    decoder_config(config)
    return "".join(caplog.messages)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3", "gpt-oss", "mixtral", "deepseek-v3", "mpt"])
def test_key_that_nothing_reads_is_named_at_load_and_no_other_is(family, checkpoints, caplog):
    config = read_config(checkpoints[family])
    assert said_of(config, caplog) == ""
    said = said_of(config | {"zeta_multiplier": 0.22, "new_scale": [1, 2], "use_cache": False, "gone": None}, caplog)
    assert "new_scale=[1, 2], zeta_multiplier=0.22, which nothing here reads" in said
    assert "use_cache" not in said and "gone" not in said
    decoder_config(config | {"zeta_multiplier": 0.22, "new_scale": [1, 2]})
    assert len(caplog.messages) == 1, "the plan of the memory and the load read the same file"


def test_kinds_of_layers_that_a_family_does_not_ask_for_are_named_unless_all_are_full(checkpoints, caplog):
    config = read_config(checkpoints["llama"])
    assert said_of(config | {"layer_types": ["full_attention"] * 2}, caplog) == ""
    assert "layer_types" in said_of(config | {"layer_types": ["full_attention", "sliding_attention"]}, caplog)
