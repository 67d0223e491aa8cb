"""A server measures steps before it serves; what it serves then does not depend on its token budget."""

import pytest

from sojourn.engine.config import EngineConfig
from sojourn.engine.core import build
from sojourn.engine.request.token_budget import FixedBudget, LearningBudget
from tests.engine.harness import drain, hand_over, submit
from tests.engine.published import Published

SETTINGS = {"model": "tiny-model", "threads": 1, "num_kv_blocks": 40, "max_model_len": 256, "max_num_seqs": 4}
PROMPTS = [list(range(100 + n, 160 + n)) for n in range(4)]


def generated(**settings) -> list[list[int]]:
    published = Published()
    engine, _ = build(EngineConfig(**SETTINGS, **settings), 0, published.take, streams=True)
    for number, prompt in enumerate(PROMPTS):
        hand_over(engine, [submit(f"r{number}", prompt)])
        engine.step()
    drain(engine)
    return engine.scheduler.budget, [published.tokens[f"r{number}"] for number in range(len(PROMPTS))]


@pytest.mark.parametrize("telemetry", ["full", "off"])
def test_a_server_knows_its_speed_before_the_first_request_and_gives_the_same_tokens(telemetry):
    budget, tokens = generated(telemetry=telemetry, max_num_batched_tokens="auto")
    assert isinstance(budget, LearningBudget) and budget._model.steps >= LearningBudget.STEPS_OF_MEASURED
    fixed, expected = generated(max_num_batched_tokens=7)
    assert isinstance(fixed, FixedBudget) and fixed.most == 7
    assert tokens == expected
