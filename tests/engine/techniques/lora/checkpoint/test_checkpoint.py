"""What a LoRA checkpoint says, and the sentences for those that cannot be served."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from sojourn.engine.techniques.lora.checkpoint.checkpoint import CONFIG, WEIGHTS, AdapterError, describe
from sojourn.engine.techniques.lora.checkpoint.fit import AdaptedModel
from sojourn.engine.techniques.lora.kernels.backend import AdapterParts
from sojourn.engine.token.models.registry import outlined_model

KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


def write(folder, config=None, **shapes):
    """A tiny adapter of one module; `shapes` of A and B."""
    folder.mkdir(exist_ok=True)
    said = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]} | (config or {})
    (folder / CONFIG).write_text(json.dumps(said))
    sizes = {"A": (2, 64), "B": (64, 2)} | shapes
    save_file({KEY.format(side): torch.ones(size) for side, size in sizes.items()}, folder / WEIGHTS)
    return folder


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 4 / 2**0.5),
        ({"alpha_pattern": {"self_attn.q_proj": 6}}, 3.0),
        ({"alpha_pattern": {"mlp": 6, r"layers\.\d+\..*q_proj": 8}}, 4.0),
        ({"r": 8, "rank_pattern": {"q_proj": 2}}, 2.0),
        ({"target_modules": r".*\.q_proj"}, 2.0),
        ({"target_modules": "all-linear"}, 2.0),
    ],
)
def test_the_scale_of_a_module(tmp_path, config, scale):
    (module,) = describe(write(tmp_path / "a", config)).modules
    assert (module.rank, module.in_features, module.out_features) == (2, 64, 64)
    assert module.scale == pytest.approx(scale)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"use_dora": True}, "use_dora.*DoRA scales the rows"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save.*merge it"),
        ({"bias": "lora_only"}, "bias='lora_only'"),
        ({"peft_type": "IA3"}, "peft_type='IA3'"),
        ({"init_lora_weights": "pissa_niter_4"}, "base model that training changed"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "adapts experts"),
        ({"something_new": [1]}, "something_new.*not supported"),
        ({"r": 4}, "rank 2, and adapter_config.json says 4"),
        ({"r": "2"}, "r='2'; it must be a number"),
        ({"lora_alpha": float("nan")}, "must be a number"),
        ({"target_modules": ["v_proj"]}, "does not name"),
        ({"target_modules": "(q_proj"}, "target_modules the expression"),
        ({"target_modules": "(([a-z.0-9_])+)+!"}, "does not name"),  # Python's engine would try 2^30 ways
        ({"target_modules": r"(?!vision).*q_proj"}, "RE2 does not take"),
        ({"target_modules": None}, "must be names or an expression"),
    ],
)
def test_a_config_that_cannot_be_honoured_gets_a_sentence(tmp_path, config, sentence):
    with pytest.raises(AdapterError, match=sentence):
        describe(write(tmp_path / "a", config))


def test_damaged_files_get_a_sentence(tmp_path):
    folder = write(tmp_path / "a", B=(64, 3))
    with pytest.raises(AdapterError, match=r"lora_B.*\[64, 3\].*rank 2"):
        describe(folder)
    (folder / WEIGHTS).write_bytes(b"\x08")
    with pytest.raises(AdapterError, match="damaged or not complete"):
        describe(folder)
    (folder / CONFIG).write_text("{")
    with pytest.raises(AdapterError, match="not JSON"):
        describe(folder)
    with pytest.raises(AdapterError, match="does not exist"):
        describe(tmp_path / "nothing")
    for key in ("base_model.model.lm_head.weight", KEY.format("embedding_A")):
        save_file({key: torch.ones(2, 2)}, write(tmp_path / "b") / WEIGHTS)
        with pytest.raises(AdapterError, match="no LoRA matrix of a linear layer"):
            describe(tmp_path / "b")
    save_file({KEY.format("A"): torch.ones(2, 64)}, write(tmp_path / "c") / WEIGHTS)
    with pytest.raises(AdapterError, match="not the other matrix"):
        describe(tmp_path / "c")


def test_other_weights_under_the_same_name_are_another_adapter(tmp_path):
    folder = write(tmp_path / "a")
    before = describe(folder).named("x")
    tensors = load_file(folder / WEIGHTS)
    tensors[KEY.format("B")][0, 0] = 2.0
    save_file(tensors, folder / WEIGHTS)
    after = describe(folder).named("x")
    assert before.key != after.key and before.key.startswith("x@")
    assert (after.rank, after.parameters, after.nbytes) == (2, 256, 1024)


def test_an_adapter_of_another_model_is_refused_by_its_module(tmp_path, checkpoints):
    adapted = AdaptedModel(outlined_model(checkpoints["llama"], torch.float32, torch.device("cpu"), None).model)
    parts: AdapterParts = adapted.read(describe(write(tmp_path / "fits")))
    assert [part.begin for part in parts[0]] == [0]
    with pytest.raises(AdapterError, match=r"q_proj.*\[64, 32\].*\[64, 64\].*another model"):
        adapted.fitted(describe(write(tmp_path / "a", A=(2, 32))))
    other = write(tmp_path / "b")
    tensors = {key.replace("layers.0", "layers.9"): tensor for key, tensor in load_file(other / WEIGHTS).items()}
    save_file(tensors, other / WEIGHTS)
    with pytest.raises(AdapterError, match=r"layers\.9.*no linear layer of this model"):
        adapted.fitted(describe(other))
