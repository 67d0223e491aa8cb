"""A config.json without a key means what it means to transformers, or is refused."""

import dataclasses
import functools

import pytest
import transformers

from sojourn.engine.token.models.registry import FAMILIES as ARCHITECTURES
from sojourn.engine.token.models.registry import decoder_config
from sojourn.engine.token.models.rope import rope_parameters
from sojourn.metrics.compute.config_defaults import DEFAULTS, completed
from sojourn.metrics.errors import ModelError
from tests.engine.families import FAMILIES, MPT_SIZES, SIZES

# Sizes that a checkpoint must name.
NEEDED = {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "d_model", "n_heads",
    "n_layers", "moe_intermediate_size", "num_local_experts", "num_experts_per_tok", "n_group", "topk_group",
}  # fmt: skip
HEADS = {"num_attention_heads": 32, "hidden_size": 256}  # so many that the defaults of keys and values divide them


def facts(value, path=""):
    """Path → number or name, of all that a decoder is built from."""
    if isinstance(value, functools.partial):
        value = {"made": value.func.__name__, "of": value.args, "with": value.keywords}
    elif dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict) and "architectures" in value:
        value = {key: each for key, each in rope_parameters(value).items() if each is not None and key != "type"}
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {place: fact for key, each in items for place, fact in facts(each, f"{path}.{key}").items()}
    is_plain = value is None or isinstance(value, int | float | str)
    return {path: value if is_plain else getattr(value, "__qualname__", type(value).__name__)}


def described(config):
    try:
        return facts(decoder_config(config))
    except ModelError as error:
        return str(error)


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_key_is_the_default_of_transformers_or_refused(family):
    name, own = FAMILIES[family]
    make = getattr(transformers, f"{name}Config")
    sizes = MPT_SIZES if name == "Mpt" else SIZES if "Deepseek" in name else SIZES | HEADS
    whole = make(**(sizes | own)).to_dict()
    architectures = {"architectures": [f"{name.removesuffix('Text')}ForCausalLM"]}
    for key in whole.keys() - {"model_type", "architectures"}:
        less = {other: value for other, value in whole.items() if other != key}
        try:
            theirs = make.from_dict(dict(less)).to_dict()
        except Exception:  # transformers refuses it
            continue
        ours = described(less | architectures)
        assert ours == described(theirs | architectures) or (
            isinstance(ours, str) and (key in NEEDED or "sliding" in key or "attention_bias" in ours)
        ), (key, ours)


@pytest.mark.parametrize("architecture", DEFAULTS)
def test_defaults_are_those_of_the_class(architecture):
    name = architecture.removesuffix("ForCausalLM").replace("MPT", "Mpt")
    name = "Gemma3Text" if name.startswith("Gemma3") else name
    said = getattr(transformers, f"{name}Config")().to_dict()
    assert {key: said[key] for key in DEFAULTS[architecture]} == DEFAULTS[architecture]


def test_each_family_has_defaults_and_null_is_none_of_them():
    assert DEFAULTS.keys() == ARCHITECTURES.keys()
    said = {"architectures": ["DeepseekV3ForCausalLM"], "q_lora_rank": None}
    assert completed(said)["q_lora_rank"] is None and completed(said)["routed_scaling_factor"] == 2.5
