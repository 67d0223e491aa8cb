"""However a CPU holds its matrices, products are those of the weights as rounded, and a row's bits are its own."""

import logging
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from sojourn.engine.compute import weight_formats
from sojourn.engine.compute.cpp.extension import library
from sojourn.engine.compute.cpp.matrices import LARGEST_INNER
from sojourn.engine.compute.linear import Linear
from sojourn.engine.compute.quantisation.rounding import round_to_nearest
from sojourn.engine.compute.weight_formats import cpp_formats, quantize_channels, torch_formats
from sojourn.engine.config import model_folder
from sojourn.engine.token.models.moe import MixtureOfExperts
from sojourn.engine.token.models.registry import load_model
from sojourn.engine.token.models.weights import stored_dtype
from sojourn.engine.token.text.tokenizer import Tokenizer
from sojourn.metrics.errors import ModelError
from tests.engine.harness import drain, hand_over, make_engine, submit

CPU = torch.device("cpu")
OURS = cpp_formats(library()) if library() is not None else {}
NAMES = ("float32", "bfloat16", "float16", "int8")
# Outputs and inputs: whole panels; tails of a panel, of 16 lanes and of four bytes; more inputs than one chain takes.
SIZES = ((64, 64), (17, 5), (100, 37), (130, 1030), (1, 1))
ROWS = (1, 2, 5, 6, 7, 13, 101)  # around a tile, and more than a work item covers


@pytest.fixture(autouse=True)
def one_thread():
    """A second one would only wait for a core here."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def ours(name: str):
    if name not in OURS:
        pytest.skip(f"this machine has no kernel for {name}")
    return OURS[name]


def operands(rows: int, outputs: int, inputs: int, bias: bool = True):
    generator = torch.Generator().manual_seed(rows * 31 + outputs + inputs)
    x, weight = (torch.randn(*size, generator=generator) for size in ((rows, inputs), (outputs, inputs)))
    return x, weight, torch.randn(outputs, generator=generator) if bias else None


def expected(name: str, x, weight, bias) -> torch.Tensor:
    """The product in float64, after the roundings that the format is allowed."""
    if name == "int8":
        weight, scales = quantize_channels(weight)
        least = x.amin(1, keepdim=True).clamp(max=0)
        ranges = x.amax(1, keepdim=True).clamp(min=0) - least
        zeros = (-least * (255 / ranges)).round()
        rounded = ((x * (255 / ranges)).round() + zeros).clamp(0, 255) - zeros
        product = (rounded.double() @ weight.double().T) * scales.double() * (ranges.double() / 255)
    else:
        product = x.double() @ weight.to(getattr(torch, name)).double().T
    return product if bias is None else product + bias


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_product_is_that_of_the_weights_as_rounded(name, bias):
    for outputs, inputs in SIZES:
        for rows in ROWS:
            x, weight, added = operands(rows, outputs, inputs, bias)
            product = ours(name).pack(weight, added).apply(x)
            # Rounding of float32 sums; a sum of integers has none before it is scaled.
            bound = 3e-7 * (2 if name == "int8" else math.sqrt(inputs)) * x.norm(dim=1).max() * weight.norm(dim=1).max()
            assert (product - expected(name, x, weight, added)).abs().max() <= bound + 1e-6, (rows, outputs, inputs)


@pytest.mark.parametrize("name", NAMES)
def test_bits_of_a_row_depend_on_no_other_row_and_no_number_of_threads(name):
    x, weight, bias = operands(201, 130, 1030)
    packed = ours(name).pack(weight, bias)
    together = packed.apply(x)
    torch.set_num_threads(3)
    assert torch.equal(packed.apply(x), together)
    torch.set_num_threads(1)
    for rows in (1, 2, 3, 4, 5, 6, 7, 11, 100):
        assert torch.equal(packed.apply(x[90 : 90 + rows]), together[90 : 90 + rows])
    assert torch.equal(packed.apply(x.T.contiguous().T), together)  # nor on how they lie in memory


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_overflowed_is_seen_in_its_row_and_in_no_other(bad):
    x, weight, _ = operands(9, 70, 37)
    clean = ours("int8").pack(weight, None).apply(x)
    x[4, 36] = bad
    product = ours("int8").pack(weight, None).apply(x)
    assert product[4].isnan().all()
    assert torch.equal(product[[0, 1, 2, 3, 5, 6, 7, 8]], clean[[0, 1, 2, 3, 5, 6, 7, 8]])


def test_zeros_and_the_smallest_numbers_are_no_division_by_zero():
    x, weight, bias = operands(3, 20, 40)
    x[0], x[1], weight[7] = 0.0, 1e-40, 0.0
    product = ours("int8").pack(weight, bias).apply(x)
    assert torch.equal(product[:2], bias.expand(2, -1))
    assert product[2, 7] == bias[7]


@pytest.mark.parametrize("name", NAMES)
def test_no_rows_give_no_rows(name):
    _, weight, bias = operands(1, 70, 40)
    assert ours(name).pack(weight, bias).apply(torch.empty(0, 40)).shape == (0, 70)


@pytest.mark.parametrize("name", torch_formats())
def test_torch_formats_agree_within_their_rounding(name):
    x, weight, bias = operands(13, 100, 1030)
    exact = x @ weight.T + bias
    error = (torch_formats()[name].pack(weight, bias).apply(x) - exact).norm() / exact.norm()
    assert error < {"float32": 1e-6, "float16": 5e-4, "int8": 0.03}[name]


def test_packing_keeps_no_second_copy():
    layer = Linear(40, 70, bias=True).requires_grad_(False)
    layer.pack(weight_formats.weight_format("auto", torch.float32))
    assert not list(layer.parameters()) and layer.weight is None
    assert layer.packed_parameters == 41 * 70


def packed_weights(model) -> list:
    """Every matrix of a model that is packed."""
    found = []
    for module in model.modules():
        if isinstance(module, Linear):
            found.append(module.method)
        elif isinstance(module, MixtureOfExperts):
            found += [expert for part in module.methods for expert in part]
    return found


@pytest.mark.parametrize("family", ["llama", "qwen2", "mixtral"])  # untied, tied, with experts
def test_half_a_checkpoint_is_read_as_it_is_and_gives_the_bits_of_float32(family, checkpoints, tmp_path):
    ours("bfloat16")
    folder = checkpoints[family]
    stored = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    save_file({name: tensor.bfloat16() for name, tensor in stored.items()}, tmp_path / "model.safetensors")
    shutil.copy(folder / "config.json", tmp_path)
    half, whole = (load_model(tmp_path, torch.float32, CPU, None, weights=name) for name in ("auto", "float32"))
    assert (half.packed_format, whole.packed_format) == ("bfloat16", "float32")
    assert half.num_parameters == whole.num_parameters == sum(t.numel() for t in stored.values())
    x = {inputs: torch.randn(5, inputs) for inputs in (64, 96)}
    for narrow, wide in zip(packed_weights(half), packed_weights(whole), strict=True):
        assert torch.equal(narrow.apply(x[narrow.in_features]), wide.apply(x[narrow.in_features]))
    if (experts := half.shape().experts) is not None:
        assert experts.expert_bytes == whole.shape().experts.expert_bytes / 2 == 2 * 3 * 64 * 96
    assert half.shape().weight_bytes < 0.55 * whole.shape().weight_bytes
    # The table of embeddings is looked up, not read; a tied head has a packed copy of it.
    routed = 0 if experts is None else experts.num_layers * experts.num_experts * experts.expert_bytes
    assert half.weight_bytes - half.shape().weight_bytes - routed == half.embedding.nbytes == 320 * 64 * 2


@pytest.mark.parametrize(
    ("other", "held"),
    [(torch.ones(4, 2).bfloat16(), torch.bfloat16), (torch.ones(4), torch.bfloat16), (torch.ones(4, 2), torch.float32)],
    ids=["all matrices alike", "a norm is no matrix", "matrices of two kinds"],
)
def test_what_a_checkpoint_stores_is_told_by_its_matrices(other, held, tmp_path):
    save_file({"a": torch.ones(2, 3).bfloat16(), "b": other}, tmp_path / "model.safetensors")
    assert stored_dtype(tmp_path) == held


def text_logprobs(weights: str) -> torch.Tensor:
    """What a trained model says of the tokens of English text: their log-probabilities."""
    engine, published = make_engine("tiny-model", weights=weights)
    text = (model_folder("tiny-model") / "prompts.txt").read_text(encoding="utf-8")
    prompt = Tokenizer(model_folder("tiny-model")).encode(text[:4000])[:250]
    hand_over(engine, [submit("r", prompt, 1, logprobs=0, prompt_logprobs=0)])
    drain(engine)
    return torch.tensor([entry.logprob for entry in published.prompt_logprobs["r"]])


# Seen: float16 4.2e-4 on average and 1.9e-3 at most; int8 0.029 and 0.13. The text's own mean is -3.2.
@pytest.mark.parametrize(("weights", "mean", "most"), [("float16", 1e-3, 5e-3), ("int8", 0.06, 0.4), ("int4", 0.5, 4)])
def test_rounded_weights_change_log_probabilities_little(weights, mean, most):
    ours(weights)
    errors = (text_logprobs(weights) - text_logprobs("float32")).abs()
    assert 0 < errors.mean() < mean
    assert errors.max() < most


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"dtype": "float16"}])
def test_weights_are_of_float32_arithmetic_only(settings, checkpoints):
    with pytest.raises(ModelError, match=r"weights=int8 has no kernel here for .*16 on cpu; leave it out"):
        make_engine(checkpoints["llama"], weights="int8", **settings)


def test_checkpoint_that_float16_cannot_hold_is_refused():
    _, weight, _ = operands(1, 20, 20)
    weight[3, 3] = 70_000.0
    with pytest.raises(ModelError, match="beyond 65504"):
        ours("float16").pack(weight, None)


def test_sums_that_an_int32_cannot_hold_are_refused():
    with pytest.raises(ModelError, match=f"sums up to {LARGEST_INNER} products"):
        ours("int8").pack(torch.empty(1, LARGEST_INNER + 1), None)


def test_without_a_compiler_torch_multiplies_and_says_what_is_lost(monkeypatch, caplog):
    monkeypatch.setattr(weight_formats, "library", lambda: None)
    assert weight_formats.weight_format("auto", torch.bfloat16).name == "float32"
    if "int8" in torch_formats():
        with caplog.at_level(logging.WARNING):
            weight_formats.weight_format("int8", torch.float32)
        assert "depends on the others beside it" in caplog.text
    monkeypatch.setattr(weight_formats, "torch_formats", lambda: {"float32": torch_formats()["float32"]})
    with pytest.raises(ModelError, match=r"weights=int8 has no kernel here: .*; use float32"):
        weight_formats.weight_format("int8", torch.float32)


@pytest.mark.parametrize("name", [*(f"ours {n}" for n in OURS), *(f"torch {n}" for n in torch_formats())])
def test_a_method_gives_the_weight_that_it_multiplies_by(name):
    _, weight, bias = operands(1, 70, 37)
    kind, name = name.split()
    method = {"ours": OURS, "torch": torch_formats()}[kind][name].pack(weight, bias)
    if name == "int4":
        rounded = round_to_nearest(weight).dequantised()
    else:
        codes, scales = quantize_channels(weight)
        rounded = codes * scales[:, None] if name == "int8" else weight.to(getattr(torch, name)).float()
    assert (method.dequantised() - rounded).abs().max() < 1e-6
    assert (method.out_features, method.in_features) == weight.shape
