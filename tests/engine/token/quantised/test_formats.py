"""A quantised checkpoint is the dense one of the values that its tensors stand for."""

import json
import re
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from sojourn.engine.compute.quantisation.kernels import Kernels
from sojourn.engine.token.models import registry
from sojourn.engine.token.models.registry import load_model, outlined_model
from sojourn.engine.token.quantised.registry import weight_scheme
from sojourn.metrics.errors import ModelError
from tests.engine.harness import drain, hand_over, make_engine, submit
from tests.engine.token.quantised.published import (
    FLOAT,
    INT,
    MXFP4,
    NVFP4,
    PACKED,
    awq,
    block_fp8,
    by_library,
    gptq,
    modelopt_nvfp4,
    publish,
    tensor_fp8,
)  # fmt: skip

CPU = torch.device("cpu")
INT8_TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
FP8_TOKENS = INT8_TOKENS | {"type": "float"}
FP8_FIXED = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
FORMATS = {
    "W4A16": lambda: by_library(PACKED, {"num_bits": 4, "strategy": "group", "group_size": 32}),
    "W4A16 with zeros": lambda: by_library(
        PACKED, {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}),
    "W3A16": lambda: by_library(PACKED, {"num_bits": 3, "strategy": "group", "group_size": 32}),
    "W8A16 by channel": lambda: by_library(PACKED, {"num_bits": 8, "strategy": "channel"}),
    "INT8 W8A8": lambda: by_library(INT, {"num_bits": 8, "strategy": "channel"}, INT8_TOKENS),
    "FP8 W8A8": lambda: by_library(FLOAT, {"num_bits": 8, "type": "float", "strategy": "channel"}, FP8_TOKENS),
    "FP8 W8A8 fixed": lambda: by_library(FLOAT, {"num_bits": 8, "type": "float", "strategy": "tensor"}, FP8_FIXED),
    "NVFP4": lambda: by_library(
        NVFP4, {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
    "MXFP4": lambda: by_library(
        MXFP4, {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}),
    "NVFP4 of ModelOpt": modelopt_nvfp4,
    "AWQ": awq,
    "GPTQ": gptq,
    "GPTQ with zeros": lambda: gptq(symmetric=False),
    "GPTQ with zeros, v2": lambda: gptq(symmetric=False, version=2),
    "GPTQ in activation order": lambda: gptq(activation_order=True),
    "GPTQ of 8 bits, one group": lambda: gptq(8, -1),
    "GPTQ of 3 bits": lambda: gptq(3),
    "GPTQ of 2 bits": lambda: gptq(2, symmetric=False),
    "FP8 by block": block_fp8,
    "FP8 by matrix": tensor_fp8,
}  # fmt: skip
OTHERS = [
    ("mixtral", "AWQ"),
    ("qwen3-moe", "W4A16"),
    ("qwen3-moe", "INT8 W8A8"),
    ("deepseek-v2", "FP8 by block"),
    ("deepseek-v2", "W8A16 by channel"),
]


@pytest.fixture(scope="module")
def published(checkpoints, tmp_path_factory):
    """(family, format) → folders of the quantised checkpoint and of the dense one."""
    made = {}

    def folders(family: str, form: str):
        if (family, form) not in made:
            target = tmp_path_factory.mktemp("quantised")
            made[family, form] = publish(checkpoints[family], target, *FORMATS[form]())
        return made[family, form]

    return folders


def weights_of(model) -> Iterator[torch.Tensor]:
    """Every matrix, however it is held, [out, in]."""
    for module in model.matrices():
        methods = [module.method] if hasattr(module, "method") else [e for part in module.methods for e in part]
        yield from (method.dequantised() for method in methods)
    yield from (parameter for parameter in model.parameters())


def greedy(folder, **options) -> list[int]:
    engine, published = make_engine(folder, **options)
    hand_over(engine, [submit("r", list(range(3, 40)), 12)])
    drain(engine)
    return published.tokens["r"]


@pytest.mark.parametrize(("family", "form"), [*(("qwen2", form) for form in FORMATS), *OTHERS])
def test_weights_are_those_that_the_tensors_stand_for(family, form, published):
    quantised, dense = published(family, form)
    expected = load_model(dense, torch.float32, CPU, None, weights="float32")
    model = load_model(quantised, torch.float32, CPU, None, weights="auto")
    assert model.num_parameters == expected.num_parameters
    for ours, theirs in zip(weights_of(model), weights_of(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    outline = outlined_model(quantised, torch.float32, CPU, None, weights="auto")
    assert 0.75 * outline.weight_bytes <= model.weight_bytes <= 1.6 * outline.weight_bytes  # narrow scales; padding
    assert all(parameter.is_meta for parameter in outline.model.parameters())
    dummy = load_model(quantised, torch.float32, CPU, None, weights="auto", load_format="dummy")
    assert (dummy.held_as, dummy.num_parameters) == (model.held_as, model.num_parameters)
    assert 0.7 <= dummy.weight_bytes / model.weight_bytes <= 1.1  # what float16 holds, and zeros of one value
    assert all(weight.isfinite().all() and weight.std() > 0.005 for weight in weights_of(dummy) if weight.dim() == 2)


@pytest.mark.parametrize("form", ["W4A16 with zeros", "GPTQ in activation order", "FP8 by block"])
def test_greedy_tokens_are_those_of_the_dequantised_weights(form, published):
    """In float32: kernels of quantised weights round activations, which their own tests bound."""
    quantised, dense = published("qwen2", form)
    assert greedy(quantised, weights="float32") == greedy(dense, weights="float32")


def change(folder, target, tensors=(), **changed):
    """A copy with other tensors (None leaves one out) and other settings."""
    target.mkdir()
    stored = load_file(folder / "model.safetensors")
    for name, alter in tensors:
        tensor = alter(stored.pop(name))
        stored |= {} if tensor is None else {name: tensor.contiguous()}
    save_file(stored, target / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changed
    (target / "config.json").write_text(json.dumps(config))
    return target


LAYER = "model.layers.1.self_attn.k_proj"
BAD = {
    "no scales": ("AWQ", [(f"{LAYER}.scales", lambda t: None)], {}, f"tensor {LAYER}.scales is missing"),
    "no zeros": ("GPTQ", [(f"{LAYER}.qzeros", lambda t: None)], {}, f"tensor {LAYER}.qzeros is missing"),
    "scales of another group": ("AWQ", [(f"{LAYER}.scales", lambda t: t[:1])], {},
                                f"tensor {LAYER}.scales has shape [1, 32], expected [2, 32]"),
    "another group size": ("AWQ", [], {"group_size": 16}, "down_proj.scales has shape [3, 64], expected [6, 64]"),
    "group that does not divide": ("GPTQ", [], {"group_size": 40}, "which its group size 40 does not divide"),
    "a group of nothing": ("AWQ", [], {"group_size": 0}, "group_size=0; it must be a whole number of at least 1"),
    "5 bits": ("GPTQ", [], {"bits": 5}, "bits=5; supported for this format are 2, 3, 4, 8"),
    "AWQ of 3 bits": ("AWQ", [], {"bits": 3}, "bits=3; supported for this format are 4"),
    "another layout": ("AWQ", [], {"version": "gemv"}, "only the layout gemm"),
    "marlin": ("GPTQ", [], {"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
    "another method": ("AWQ", [], {"quant_method": "hqq"}, "quant_method='hqq'; supported are compressed-tensors, awq"),
    "NaN in scales": ("GPTQ", [(f"{LAYER}.scales", lambda t: t.fill_(float("nan")))], {},
                      f"scales of {LAYER}.weight hold a number that is not finite"),
    "NaN in codes": ("FP8 W8A8", [(f"{LAYER}.weight", lambda t: torch.full_like(t.float(), float("nan")).to(t.dtype))],
                     {}, f"tensor {LAYER}.weight holds a code that is no number"),
    "MXFP4 exponent of 255": ("MXFP4", [(f"{LAYER}.weight_scale", lambda t: t.fill_(255))], {}, "not finite"),
    "groups of unequal size": ("GPTQ in activation order", [(f"{LAYER}.g_idx", lambda t: t.fill_(0))], {},
                               f"tensor {LAYER}.g_idx does not give each group 32 inputs"),
    "zeros of no symmetry": ("GPTQ with zeros", [], {"sym": True}, "has other zeros than 8"),
    "FP8 without scales": ("FP8 by block", [(f"{LAYER}.weight_scale_inv", lambda t: None)], {},
                           f"tensor {LAYER}.weight is torch.float8_e4m3fn, but the checkpoint has no scales for it"),
    "FP8 of other blocks": ("FP8 by block", [], {"weight_block_size": [64, 64]}, "has shape [2, 3], expected"),
    "E5M2": ("FP8 by block", [], {"fmt": "e5m2"}, "fmt='e5m2'; supported are e4m3"),
    "no group": ("W4A16", [], {"config_groups": {}}, "has no config_groups"),
    "sparse": ("W4A16", [], {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights are not supported"),
    "words that do not fit": ("W4A16", [(f"{LAYER}.weight_packed", lambda t: t[:, :5])], {},
                              "weight_packed has 5 words a row, which do not hold 64 inputs"),
    "no zeros in words": ("W4A16 with zeros", [(f"{LAYER}.weight_zero_point", lambda t: None)], {},
                          f"tensor {LAYER}.weight_zero_point is missing"),
    "packed as floats": ("AWQ", [(f"{LAYER}.qweight", lambda t: t.float())], {},
                         f"tensor {LAYER}.qweight is torch.float32, expected torch.int32"),
    "no fixed scale": ("FP8 W8A8 fixed", [(f"{LAYER}.input_scale", lambda t: None)], {},
                       f"tensor {LAYER}.input_scale is missing"),
    "more rows than the layer": ("W4A16", [(f"{LAYER}.{part}", lambda t: torch.cat([t, t])) for part in
                                           ("weight_packed", "weight_scale")], {},
                                 f"tensor {LAYER}.weight has shape [64, 64], expected [32, 64]"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_checkpoint_is_refused_by_the_name_of_the_tensor(name, published, tmp_path):
    form, tensors, changed, sentence = BAD[name]
    folder = change(published("qwen2", form)[0], tmp_path / "bad", tensors, **changed)
    only_values_show_it = "NaN" in name or "255" in name or "symmetry" in name
    with pytest.raises(ModelError, match=re.escape(sentence)):  # the others before memory is taken
        (load_model if only_values_show_it else outlined_model)(folder, torch.float32, CPU, None, weights="auto")


def test_layers_that_stay_dense_and_biases_of_zeros_are_read(checkpoints, tmp_path):
    """Old GPTQ files hold a bias of zeros for every layer, and a fused layer may be quantised in part."""
    quantised, dense = publish(checkpoints["llama"], tmp_path, *gptq(), skip=("k_proj", "layers.2.mlp"))
    stored = load_file(quantised / "model.safetensors")
    stored |= {f"model.layers.{i}.self_attn.o_proj.bias": torch.zeros(64) for i in range(3)}
    save_file(stored, quantised / "model.safetensors")
    models = [load_model(folder, torch.float32, CPU, None, weights="float32") for folder in (quantised, dense)]
    for ours, theirs in zip(*map(weights_of, models), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    stored["model.layers.0.self_attn.o_proj.bias"][3] = 0.5
    save_file(stored, quantised / "model.safetensors")
    with pytest.raises(ModelError, match=r"o_proj\.bias has no place"):
        load_model(quantised, torch.float32, CPU, None, weights="float32")


def test_without_a_kernel_weights_take_the_dtype_of_config_json(published, monkeypatch):
    quantised, _ = published("qwen2", "INT8 W8A8")
    monkeypatch.setattr(registry, "device_kernels", lambda device, dtype: Kernels())
    assert load_model(quantised, torch.float32, CPU, None, weights="auto").held_as == "float32"
    model = load_model(quantised, torch.bfloat16, CPU, None)  # as on a GPU: tensors of torch
    assert model.held_as is None and model.layers[0].attention.qkv.weight.dtype == torch.bfloat16


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.sampled_from(["int", "float", "group", "re:("]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["weights", "targets", "a"]), inner),
    max_leaves=4,
)


@settings(max_examples=100)
@given(st.sampled_from(sorted(FORMATS)), st.data())
def test_settings_of_any_kind_give_a_format_or_a_sentence(form, data):
    config = json.loads(json.dumps(FORMATS[form]()[0]))
    within = config
    while isinstance(within, dict) and within:
        key = data.draw(st.sampled_from(sorted(within)))
        if not isinstance(within[key], dict) or data.draw(st.booleans()):
            within[key] = data.draw(VALUES)
            break
        within = within[key]
    before = json.dumps(config)
    try:
        scheme = weight_scheme({"quantization_config": config})
        outline = None if scheme is None else scheme.outline("model.layers.0.mlp.down_proj", 64, 96)
    except ModelError as error:
        assert re.fullmatch(r"[^\n]{20,600}", str(error)), "a sentence"
    else:
        assert outline is None or outline.shape == (64, 96), "a matrix of the layer, or the layer is dense"
        if outline is not None:
            assert outline.bits in range(2, 9) and 96 % outline.group == 0
            assert outline.scales.shape == (64, 96 // outline.group) and outline.scales.is_meta
    assert json.dumps(config) == before, "what was read is not changed"
