"""All layers in one call compute what the same kernels compute when they are called one by one."""

import random

import pytest

from engine.compute.cpp.extension import library
from engine.token.models import decoder
from tests.engine.harness import drain, hand_over, make_engine, submit

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ kernels can be built here")

JOINED = ("llama", "llama-biases", "mistral", "qwen2-windows", "qwen3", "gemma")
APART = ("mixtral", "deepseek-v2", "mpt")  # experts, latent attention, layer norms without a gate


def outputs(folder, **settings):
    """Tokens and log-probabilities of prompts whose steps are chunks, decodes and both."""
    dice = random.Random(1)
    engine, published = make_engine(folder, max_num_batched_tokens=64, **settings)
    prompts = [[dice.randrange(3, 320) for _ in range(length)] for length in (1, 16, 70, 200)]
    hand_over(engine, [submit(f"r{i}", prompt, 8, logprobs=2) for i, prompt in enumerate(prompts)])
    drain(engine)
    return engine, published.tokens, published.logprobs


@pytest.mark.parametrize("weights", ["float32", "int8"])
@pytest.mark.parametrize("family", JOINED)
def test_one_call_gives_the_bits_of_many(family, weights, checkpoints, monkeypatch):
    engine, tokens, logprobs = outputs(checkpoints[family], weights=weights)
    assert engine.runner.model._joined[1] is not None
    monkeypatch.setattr(decoder.Decoder, "_join", lambda *parts: None)
    engine, *apart = outputs(checkpoints[family], weights=weights)
    assert engine.runner.model._joined[1] is None
    assert [tokens, logprobs] == apart


@pytest.mark.parametrize("family", APART)
def test_what_has_a_part_without_a_kernel_is_computed_part_by_part(family, checkpoints):
    engine, *_ = outputs(checkpoints[family])
    assert engine.runner.model._joined[1] is None


@pytest.mark.parametrize("setting", [{"attention_backend": "torch"}, {"fused_operations": "off"}])
def test_a_setting_that_leaves_the_kernels_leaves_the_one_call(setting, checkpoints):
    engine, *_ = outputs(checkpoints["qwen3"], **setting)
    assert engine.runner.model._joined[1] is None
