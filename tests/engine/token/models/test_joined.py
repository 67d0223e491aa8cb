"""All layers in one call compute what the same kernels compute when they are called one by one."""

import random

import pytest
import torch

from sojourn.engine.compute.attention.cpp_backend import CppAttention
from sojourn.engine.compute.cpp.extension import library
from sojourn.engine.compute.kv_cache import allocate
from sojourn.engine.compute.operations.cpp_backend import CppOperations
from sojourn.engine.token.models import decoder
from sojourn.engine.token.models.registry import load_model
from sojourn.engine.token.models.taps import Taps
from tests.engine.compute.attention_inputs import attention_inputs
from tests.engine.harness import drain, hand_over, make_engine, submit

pytestmark = pytest.mark.compiler

JOINED = ("llama", "llama-biases", "mistral", "qwen2-windows", "qwen3", "gemma", "gemma2", "gemma3")
APART = ("mixtral", "gpt-oss", "deepseek-v2", "mpt")  # experts, latent attention, layer norms without a gate


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
    assert engine.runner.eager.model._joined[1] is not None
    monkeypatch.setattr(decoder.Decoder, "_join", lambda *parts: None)
    engine, *apart = outputs(checkpoints[family], weights=weights)
    assert engine.runner.eager.model._joined[1] is None
    assert [tokens, logprobs] == apart


@pytest.mark.parametrize("family", APART)
def test_what_has_a_part_without_a_kernel_is_computed_part_by_part(family, checkpoints):
    engine, *_ = outputs(checkpoints[family])
    assert engine.runner.eager.model._joined[1] is None


@pytest.mark.parametrize("setting", [{"attention_backend": "torch"}, {"fused_operations": "off"}])
def test_a_setting_that_leaves_the_kernels_leaves_the_one_call(setting, checkpoints):
    engine, *_ = outputs(checkpoints["qwen3"], **setting)
    assert engine.runner.eager.model._joined[1] is None


@pytest.mark.parametrize("family", ["llama", "gemma", "mixtral"])
def test_taps_are_the_hidden_states_of_transformers(family, checkpoints):
    """Behind each layer, of one call and of many; a pass that ends early has the last norm behind its last layer."""
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(checkpoints[family], dtype=torch.float32).eval()
    model = load_model(checkpoints[family], torch.float32, torch.device("cpu"), None, weights="float32")
    ids, num_layers = torch.arange(5, 25), len(model.layers)
    attention, operations = CppAttention(library()), CppOperations(library())
    cache = allocate(model.kv_layout, num_layers, 2, 16, torch.float32, torch.device("cpu"))
    at = torch.arange(20)
    attention.begin(attention_inputs([20], [20], at, torch.arange(2)[None], 16))
    with torch.inference_mode():
        states = oracle(ids[None], output_hidden_states=True).hidden_states
        taps = Taps((-1, *range(num_layers - 1)))
        whole = model(ids, at, at, operations, attention, cache, taps).clone()
        for tapped, layer in zip(taps.streams, taps.layers, strict=True):
            torch.testing.assert_close(tapped, states[layer + 1][0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(whole, states[-1][0], rtol=1e-4, atol=1e-4)
        exited = model(ids, at, at, operations, attention, cache, Taps(depth=1))
        expected = oracle.model.norm(states[1])[0]
    torch.testing.assert_close(exited, expected, rtol=1e-4, atol=1e-4)
