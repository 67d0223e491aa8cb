"""The option attention_window: a window with sink tokens over a model that has none."""

import pytest
import torch
from pydantic import ValidationError

from sojourn.engine.config import EngineConfig, complaint
from sojourn.metrics.errors import ModelError
from tests.engine.compute.test_kv_formats import prompt_logprobs
from tests.engine.harness import generate, make_engine
from tests.engine.token.sampling.test_logprobs import random_prompts

FAMILIES = ["qwen3", "deepseek-v2-lite", "mpt"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_window_as_long_as_the_context_changes_nothing(family, checkpoints):
    prompts = random_prompts((70, 30))
    whole, _ = generate(checkpoints[family], prompts, 10)
    assert generate(checkpoints[family], prompts, 10, attention_window=80)[0] == whole
    assert generate(checkpoints[family], prompts, 10, attention_window=60, attention_sinks=20)[0] == whole


@pytest.mark.parametrize("family", FAMILIES)
def test_every_backend_sees_the_same_tokens_in_one_chunk_and_in_many(family, checkpoints):
    prompts, window = random_prompts((90, 40)), {"attention_window": 17, "attention_sinks": 3}
    found = prompt_logprobs(checkpoints[family], prompts, **window)
    reference = {"attention_backend": "torch", "fused_operations": "off", "max_num_batched_tokens": 20}
    torch.testing.assert_close(
        found, prompt_logprobs(checkpoints[family], prompts, **window, **reference), rtol=0, atol=2e-4
    )
    assert (found - prompt_logprobs(checkpoints[family], prompts)).abs().max() > 1e-3


def test_a_model_with_windows_is_refused(checkpoints):
    with pytest.raises(ModelError, match="attention_window is for models without windows"):
        make_engine(checkpoints["qwen3-windows"], attention_window=8)


def test_sinks_belong_to_a_window():
    with pytest.raises(ValidationError) as refused:
        EngineConfig(model="m", attention_sinks=4)
    assert complaint(refused.value).startswith("attention_sinks=4 is not valid: it needs attention_window")


def test_the_settings_that_change_outputs_are_named():
    assert EngineConfig(model="m").changes_outputs == []
    config = EngineConfig(model="m", attention_window=512, kv_cache_dtype="int4")
    assert config.changes_outputs == ["kv_cache_dtype=int4", "attention_window=512", "attention_sinks=4"]
