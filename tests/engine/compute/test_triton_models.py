"""Whole models on the Triton operations give the logits that they give on the torch reference."""

import pytest
import torch

from engine.compute.attention.torch_backend import TorchAttention
from engine.compute.kv_cache import allocate
from engine.compute.operations.backend import Operations
from engine.token.models.decoder import Decoder
from engine.token.models.registry import load_model
from tests.engine.compute.triton_harness import DEVICE

pytest.importorskip("triton")

from engine.compute.operations.triton_backend import TritonOperations
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


class Choosing(Operations):
    """The reference, with the experts that it chose, call by call."""

    def __init__(self) -> None:
        self.choices: list[tuple[torch.Tensor, torch.Tensor]] = []

    def mixture(self, x, weights, experts, *rest, **options):
        self.choices.append((weights, experts))
        return super().mixture(x, weights, experts, *rest, **options)


class Following(TritonOperations):
    """With the experts of another run: two that are nearly as good change places by a rounding, and are both right."""

    def __init__(self, choices) -> None:
        super().__init__()
        self._choices = iter(choices)

    def mixture(self, x, weights, experts, *rest, **options):
        return super().mixture(x, *next(self._choices), *rest, **options)


def check(folder, dtype: torch.dtype, tolerance: float) -> None:
    model, reference = load_model(folder, dtype, DEVICE, None), Choosing()
    with torch.inference_mode():
        expected, found = logits_of(model, reference), logits_of(model, Following(reference.choices))
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


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
    check(checkpoints[family], torch.bfloat16, 0.1)
