"""A replay with max_num_batched_tokens=auto chooses its budgets as the engine would, from the fitted steps."""

from types import SimpleNamespace

import pytest

from sojourn.engine.config import EngineConfig
from sojourn.engine.request.token_budget import FixedBudget
from sojourn.metrics.prediction import Change
from sojourn.replay.token_budget import token_budget

AUTO = EngineConfig(model="", max_num_seqs=8)


class Times:
    """2 ms a step and 0.5 ms a token."""

    def device_ns(self, tokens, decodes, decode_pairs, chunks, chunk_pairs, rows):
        return 2e6 + 0.5e6 * tokens


def tokens_beside_four(change: Change, slowness: float = 1.0, objective_tpot_ms: float | None = 50) -> int:
    budget = token_budget(AUTO, change, Times(), slowness, "cpu", objective_tpot_ms)
    return budget.beside([SimpleNamespace(num_computed_tokens=9, drafts=())] * 4, [])


@pytest.mark.parametrize(
    ("change", "target_ms"),
    [
        (Change(), 40),
        (Change(settings={"objective_tpot_ms": 25}), 20),
        (Change(objectives=[{"klass": "all", "tpot_ms": 100}]), 80),
        (Change(objectives=[{"klass": "all", "ttft_ms": 500}]), 25),
    ],
)
def test_the_objective_of_the_change_is_kept(change, target_ms):
    assert tokens_beside_four(change) == (target_ms - 2) / 0.5


def test_a_faster_device_gets_more_tokens_and_a_slower_machine_fewer():
    assert tokens_beside_four(Change(device_speed=2.0)) == (80 - 2) / 0.5
    assert tokens_beside_four(Change(), slowness=2.0) == (20 - 2) / 0.5


def test_a_number_stays_the_budget_of_every_step():
    config = EngineConfig(model="", max_num_batched_tokens=64)
    assert isinstance(token_budget(config, Change(), Times(), 1.0, "cpu", None), FixedBudget)
