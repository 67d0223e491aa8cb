"""A checkpoint that is written reads back as the rounded weights, also by the libraries of its format."""

import json
import shutil
from functools import partial

import gguf
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from typer.testing import CliRunner

from sojourn.commands.program import app
from sojourn.engine.compute.quantisation.rounding import rounded_fp8, rounded_integers
from sojourn.engine.config import model_folder
from sojourn.engine.token.models.registry import load_model
from sojourn.engine.token.quantise import checkpoint
from sojourn.engine.token.quantise.checkpoint import TARGETS, quantise_checkpoint
from sojourn.engine.token.quantise.error import ReferencePredictions, text_ids
from sojourn.engine.token.quantise.gguf_writer import KINDS
from sojourn.engine.token.quantise.layouts import LAYOUTS
from sojourn.engine.token.quantise.passes import hidden_states
from sojourn.engine.token.quantise.scaling import scale_by_activations
from sojourn.engine.token.text.template_sources import template_sources
from sojourn.metrics.errors import ModelError
from tests.engine.token.quantised.published import matrices

CPU = torch.device("cpu")
IDS = [3 + (7 * i * i) % 300 for i in range(200)]
load = partial(load_model, dtype=torch.float32, device=CPU, max_model_len=None)


@pytest.mark.parametrize(("family", "to"), [*(("qwen2", to) for to in TARGETS), ("llama", "gguf-q8_0")])
def test_checkpoint_reads_back_as_the_rounded_weights(family, to, checkpoints, tmp_path):
    quantise_checkpoint(checkpoints[family], to, tmp_path / "new")
    model, dense = load(tmp_path / "new"), load(checkpoints[family])
    kind = KINDS.get(to.removeprefix("gguf-").upper())
    wider = None if kind is None else KINDS[kind.embedding]
    quantisable = dense.quantisable()
    for name, target in model.slices().items():
        expected = dense.slices()[name]
        if name in quantisable:
            rounded = None if kind else LAYOUTS[to].rounded(expected, 32 if LAYOUTS[to].grouped else None)
            expected = kind.back(expected) if kind else rounded.dequantised()
        elif kind is not None and expected.dim() == 2:
            expected = wider.back(expected)
        torch.testing.assert_close(target, expected, rtol=1e-6, atol=1e-7)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"new"}  # nothing unfinished


@pytest.mark.parametrize("to", ["int8", "fp8", "w4a16"])
def test_compressed_tensors_reads_the_same(to, checkpoints, tmp_path):
    quantise_checkpoint(checkpoints["llama"], to, tmp_path / "new")
    settings = json.loads((tmp_path / "new" / "config.json").read_text())["quantization_config"]
    scheme = QuantizationScheme(**settings["config_groups"]["group_0"])
    stored = load_file(tmp_path / "new" / "model.safetensors")
    module = "model.layers.1.mlp.up_proj"
    parts = {name.removeprefix(f"{module}."): tensor for name, tensor in stored.items() if name.startswith(module)}
    theirs = BaseCompressor.get_value_from_registry(settings["format"]).decompress(parts, scheme)["weight"]
    ours = load(tmp_path / "new").slices()[f"{module}.weight"]
    torch.testing.assert_close(ours, theirs.float(), rtol=1e-3, atol=1e-5)  # theirs is in the dtype of the scales


def test_ggufs_package_reads_the_same(checkpoints, tmp_path):
    quantise_checkpoint(checkpoints["qwen2"], "gguf-q4_0", tmp_path / "new")
    (path,) = (tmp_path / "new").iterdir()
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    slices = load(path).slices()
    for ours, theirs in (("model.layers.1.mlp.up_proj", "blk.1.ffn_up"), ("model.embed_tokens", "token_embd")):
        tensor = tensors[f"{theirs}.weight"]
        expected = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type))
        torch.testing.assert_close(slices[f"{ours}.weight"], expected, rtol=1e-6, atol=1e-7)


@settings(max_examples=40)
@given(
    st.integers(1, 9), st.sampled_from([4, 8, 32]), st.integers(1, 3), st.integers(2, 8), st.booleans(), st.integers()
)
def test_rounding_is_to_the_nearest_code(outputs, group, groups, bits, symmetric, seed):
    generator = torch.Generator().manual_seed(seed % 2**31)
    weight = torch.randn(outputs, group * groups, generator=generator) * 10.0 ** (seed % 7 - 4)
    weight[0, :group] = 0.0
    matrix = rounded_integers(weight, bits, group, symmetric=symmetric)
    matrix.check("x")
    back = matrix.dequantised()
    step = matrix.scales.repeat_interleave(group, dim=1)
    assert ((back - weight).abs() <= 0.502 * step + 2e-3 * weight.abs() + 6e-5 * 2**bits).all()
    assert (back[0, :group] == 0).all()
    assert torch.equal(matrix.scales.half().float(), matrix.scales)


def test_fp8_is_rounded_by_output():
    weight = torch.randn(5, 64) * torch.tensor([1e-3, 1.0, 30.0, 0.0, 1.0])[:, None]
    matrix = rounded_fp8(weight)
    assert (
        (matrix.dequantised() - weight).abs() <= weight.abs() / 16 + weight.abs().amax(1, keepdim=True) / 2**17
    ).all()
    assert matrix.activations == "fp8"


def outlying(model) -> None:
    """Norms that make some inputs much larger than the others, as in trained models."""
    with torch.no_grad():
        for layer in model.layers:
            layer.input_norm[::16] *= 12
            layer.post_norm[::16] *= 12


@pytest.mark.parametrize("family", ["llama", "llama-biases", "qwen3", "gemma", "mpt", "mixtral", "deepseek-v2"])
def test_scaling_changes_no_prediction_of_the_dense_model(family, checkpoints):
    model = load(checkpoints[family])
    outlying(model)
    before = model.logits(hidden_states(model, IDS[:60]))
    scaled = scale_by_activations(model, IDS[:60], lambda weight: rounded_integers(weight, 3, None).dequantised())
    assert scaled > 0 or family == "deepseek-v2"  # latent attention and mixtures have no places
    after = model.logits(hidden_states(model, IDS[:60]))
    assert (before - after).abs().max() < 2e-4 * before.abs().max()


def test_scaling_makes_rounded_weights_better(checkpoints):
    def error(scaled: bool) -> float:
        model, reference = load(checkpoints["llama"]), load(checkpoints["llama"])
        outlying(model), outlying(reference)
        predictions = ReferencePredictions("x", reference, IDS[::-1])  # other text than the calibration's

        def rounded(weight):
            return rounded_integers(weight, 3, 32, symmetric=False).dequantised()

        if scaled:
            scale_by_activations(model, IDS, rounded)
        with torch.no_grad():
            for name in model.quantisable():
                target = model.slices()[name]
                target.copy_(rounded(target))
        return predictions.error_of(model).divergence_nats

    assert error(scaled=True) < 0.8 * error(scaled=False)


def test_error_is_nothing_against_itself_and_that_of_the_definition_else(checkpoints):
    model, other = load(checkpoints["llama"]), load(checkpoints["llama"])
    predictions = ReferencePredictions("itself", model, IDS)
    same = predictions.error_of(other)
    assert (same.divergence_nats, same.likelihood_nats, same.greedy_agreement) == (0.0, 0.0, 1.0)
    assert same.num_tokens == len(IDS) - 1
    with torch.no_grad():
        other.layers[0].mlp.down.weight.mul_(1.3)
    found = predictions.error_of(other)
    p, q = (m.logits(hidden_states(m, IDS)[:-1]).log_softmax(-1) for m in (model, other))
    divergence = torch.nn.functional.kl_div(q, p, reduction="batchmean", log_target=True).item()
    assert found.divergence_nats == pytest.approx(divergence, rel=1e-3)
    targets = torch.tensor(IDS[1:])
    nll = torch.nn.functional.nll_loss
    assert found.likelihood_nats == pytest.approx((nll(q, targets) - nll(p, targets)).item(), abs=1e-5)
    assert found.greedy_agreement == pytest.approx((p.argmax(-1) == q.argmax(-1)).float().mean().item())


def test_folder_is_written_whole_or_not_at_all(checkpoints, tmp_path, monkeypatch):
    source, target = checkpoints["llama"], tmp_path / "new"
    target.mkdir()
    with pytest.raises(ModelError, match="exists; give a folder that does not"):
        quantise_checkpoint(source, "int8", target)
    target.rmdir()
    with pytest.raises(ModelError, match="no group of 48 divides the inputs of all layers"):
        quantise_checkpoint(source, "w4a16", target, group_size=48)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(ModelError, match="cannot be written: No space left"):
        quantise_checkpoint(source, "int8", target)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("family", "to", "sentence"),
    [
        ("mixtral", "gguf-q8_0", "MixtralForCausalLM is not written as GGUF"),
        ("llama3", "gguf-q8_0", "rope_type=llama3, which is not written as GGUF"),
        ("mpt", "w4a16", "Wqkv.weight holds several"),
        ("llama", "int8", "leave the group size out"),
    ],
)
def test_what_a_format_cannot_hold_is_refused(family, to, sentence, checkpoints, tmp_path):
    with pytest.raises(ModelError, match=sentence):
        quantise_checkpoint(checkpoints[family], to, tmp_path / "new", group_size=32 if to == "int8" else None)
    assert not (tmp_path / "new").exists()


def test_quantised_checkpoint_is_not_quantised_again(checkpoints, tmp_path):
    quantise_checkpoint(checkpoints["llama"], "w4a16", tmp_path / "new")
    with pytest.raises(ModelError, match="is quantised already"):
        quantise_checkpoint(tmp_path / "new", "int8", tmp_path / "newer")


def test_verb_writes_a_model_with_its_tokenizer_and_says_its_error(tmp_path):
    result = CliRunner().invoke(
        app, ["server", "quantize", "tiny-model", "--to", "w4a16", "--output", str(tmp_path / "new")]
    )
    assert result.exit_code == 0, result.output
    assert "3.8 MB of weights, 10.9 MB before" in result.output
    assert "nats per token from tiny-model" in result.output
    assert text_ids(tmp_path / "new", num_tokens=50) == text_ids(model_folder("tiny-model"), num_tokens=50)
    assert matrices(tmp_path / "new")["model.embed_tokens.weight"].shape == (2560, 256)


@pytest.mark.parametrize("to", ["gguf-q8_0", "int8"])
def test_the_templates_go_with_the_weights(tmp_path, to):
    source = shutil.copytree(model_folder("tiny-model"), tmp_path / "source")
    (source / "chat_template.jinja").write_text("plain")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    quantise_checkpoint(source, to, tmp_path / "new")
    assert template_sources(tmp_path / "new") == {"default": "plain", "tool_use": "tools"}
