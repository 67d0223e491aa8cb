"""Whole models on the Triton operations give the logits that they give on the torch reference."""

from functools import partial

import pytest
import torch

from sojourn.engine.compute.attention.torch_backend import TorchAttention
from sojourn.engine.compute.kv_cache import allocate
from sojourn.engine.compute.operations.backend import Operations
from sojourn.engine.token.models.decoder import Decoder
from sojourn.engine.token.models.registry import load_model
from tests.engine.compute.triton_harness import DEVICE

pytest.importorskip("triton")

from sojourn.engine.compute.operations.triton_backend import TritonOperations
from tests.engine.compute.attention_inputs import attention_inputs

BLOCK_SIZE = 2


def logits_of(model: Decoder, operations: Operations) -> torch.Tensor:
    """Of every token of a prompt of three, and of one that follows it, in a second step beside another prompt."""
    cache = allocate(model.kv_layout, len(model.layers), 4, BLOCK_SIZE, model.norm.dtype, DEVICE)
    tables, attention, found = torch.tensor([[3, 1], [2, 0]]), TorchAttention(), []
    for query_lens, past in (([3], [0]), ([1, 2], [3, 0])):
        owners = [row for row, new in enumerate(query_lens) for _ in range(new)]
        positions = torch.tensor([begin + i for new, begin in zip(query_lens, past, strict=True) for i in range(new)])
        slots = tables[owners, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        contexts = [new + begin for new, begin in zip(query_lens, past, strict=True)]
        positions, slots = positions.to(DEVICE), slots.to(DEVICE)
        attention.begin(attention_inputs(query_lens, contexts, slots, tables[: len(past)].to(DEVICE), BLOCK_SIZE))
        found.append(model.logits(model(positions * 7 + 3, positions, slots, operations, attention, cache)))
    return torch.cat(found)


def check(folder, dtype: torch.dtype, tolerance: float) -> None:
    model = load_model(folder, dtype, DEVICE, None)
    with torch.inference_mode():
        expected, found = logits_of(model, Operations()), logits_of(model, TritonOperations())
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def choose(model: Decoder, choices: list[tuple[torch.Tensor, torch.Tensor]] | None = None) -> list:
    """Has a model take the experts of `choices`, call by call. Without them, the list of those that it will choose."""
    left, taken = iter(choices or ()), []

    def chosen(routed, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        taken.append(next(left) if choices else routed(x))
        return taken[-1]

    for module in model.modules():
        if hasattr(module, "routed"):
            module.routed = partial(chosen, module.routed)
    return taken


def rounding_errors(folder) -> tuple[float, float]:
    """How far the logits in bfloat16 are from those in float32, of the reference and of the kernels: the most.

    All take the same experts: a rounding may exchange two that are nearly as good.
    """
    model = load_model(folder, torch.float32, DEVICE, None)
    choices, errors = choose(model), []
    with torch.inference_mode():
        exact = logits_of(model, Operations())
        for operations in (Operations(), TritonOperations()):
            model = load_model(folder, torch.bfloat16, DEVICE, None)
            choose(model, choices)
            errors.append(float((logits_of(model, operations) - exact).abs().max()))
    return errors[0], errors[1]


def test_a_model_on_the_kernels_gives_the_logits_of_the_reference(checkpoints):
    check(checkpoints["qwen3"], torch.float32, 5e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        "llama-biases",
        "gemma",
        "gemma2",
        "gemma3",
        "qwen2-windows",
        "mixtral",
        "qwen3-moe",
        "deepseek-v2-lite",
        "deepseek-v3",
        "mpt",
    ],
)
def test_other_models_do_too(family, checkpoints):
    check(checkpoints[family], torch.float32, 5e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "family", ["llama-biases", "gemma", "gemma2", "gemma3", "qwen3-moe", "mixtral", "gpt-oss", "deepseek-v3", "mpt"]
)
def test_models_on_a_device(family, checkpoints):
    check(checkpoints[family], torch.float32, 1e-4)
    reference, ours = rounding_errors(checkpoints[family])
    assert ours <= 2 * reference + 0.02
