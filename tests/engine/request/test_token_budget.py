"""max_num_batched_tokens=auto: a step with prompts and decodes stays within its target, and prompts get on."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sojourn.engine.config import EngineConfig, largest_step_tokens
from sojourn.engine.options import engine_config
from sojourn.engine.request.plan import StepOutcome
from sojourn.engine.request.token_budget import (
    DECODE_STEPS,
    LEAST_PROMPT_TOKENS,
    LEAST_STRETCH,
    OBJECTIVE_SHARE,
    START_PROMPT_TOKENS,
    UNNOTICED_MS,
    FixedBudget,
    LearningBudget,
    StepTarget,
    TimedBudget,
)  # fmt: skip
from sojourn.metrics.compute.cost_model import StepWork, step_work
from sojourn.metrics.compute.step_time import StepTimeModel, features
from tests.engine.harness import submit
from tests.engine.simulated import SHAPE, Simulation

MOST = 512


class Device:
    """So many nanoseconds a step, a token, and a pair of attention; it knows no step above `known` tokens."""

    def __init__(self, step_ns=4_000_000, token_ns=500_000, pair_ns=100, known=10_000):
        self.costs, self.known = (step_ns, token_ns, pair_ns), known

    def predict_work(self, work: StepWork, *, eager: bool = True) -> float | None:
        step_ns, token_ns, pair_ns = self.costs
        if work.tokens > self.known:
            return None
        return step_ns + token_ns * work.tokens + pair_ns * (work.decode_pairs + work.chunk_pairs)


def running(*computed: int) -> list:
    return [SimpleNamespace(drafts=(), num_computed_tokens=tokens) for tokens in computed]


def mixed_ns(device: Device, contexts: list[int], tokens: int, past: int = 0) -> float:
    work = step_work(SHAPE, [1] * len(contexts) + [tokens], [*contexts, past], len(contexts) + 1)
    return device.predict_work(work)


devices = st.builds(
    Device, st.integers(0, 20_000_000), st.integers(1_000, 2_000_000), st.integers(0, 500),
    st.sampled_from([100, 300, 10_000]),
)  # fmt: skip
contexts = st.lists(st.integers(0, 2000), min_size=1, max_size=64)
objectives = st.none() | st.floats(1, 1000)


@given(devices, contexts, st.integers(0, 2000), objectives)
def test_a_mixed_step_is_as_large_as_its_target_allows(device, contexts, past, objective):
    target = StepTarget(objective)
    budget = TimedBudget(MOST, SHAPE.windows, target, device).beside(running(*contexts), running(past))
    prompt_tokens = budget - len(contexts)
    assert LEAST_PROMPT_TOKENS <= prompt_tokens <= MOST - len(contexts)
    least_ns = mixed_ns(device, contexts, LEAST_PROMPT_TOKENS, past)
    if least_ns is None:
        return
    decode_ns = device.predict_work(step_work(SHAPE, [1] * len(contexts), contexts, len(contexts)))
    target_ns = target.target_ns(decode_ns, least_ns)
    if prompt_tokens > LEAST_PROMPT_TOKENS:
        assert mixed_ns(device, contexts, prompt_tokens, past) <= target_ns
    larger_ns = mixed_ns(device, contexts, prompt_tokens + 1, past)
    assert budget == MOST or larger_ns is None or larger_ns > target_ns


@given(devices, contexts, st.integers(0, 2000), st.floats(1, 500), st.floats(1, 4))
def test_a_looser_objective_never_gives_a_smaller_budget(device, contexts, past, objective, factor):
    tight, loose = (
        TimedBudget(MOST, SHAPE.windows, StepTarget(bound), device).beside(running(*contexts), running(past))
        for bound in (objective, factor * objective)
    )
    assert loose >= tight


def test_targets_come_from_the_objective_or_from_the_decode_step():
    assert StepTarget(50).target_ns(10e6, 12e6) == OBJECTIVE_SHARE * 50e6
    assert StepTarget(10).target_ns(10e6, 12e6) == LEAST_STRETCH * 12e6, "prompts stand still"
    assert StepTarget().target_ns(20e6, 21e6) == DECODE_STEPS * 20e6
    assert StepTarget().target_ns(1e6, 2e6) == UNNOTICED_MS * 1e6, "steps too short to matter"


def test_without_decodes_the_budget_is_the_largest_and_without_knowledge_a_start_value():
    unknowing = TimedBudget(MOST, SHAPE.windows, StepTarget(), StepTimeModel())
    assert unknowing.beside([], running(0)) == MOST
    assert unknowing.beside(running(5, 6), running(0)) == 2 + START_PROMPT_TOKENS
    assert FixedBudget(32).beside(running(5, 6), running(0)) == 32


def test_a_learning_budget_starts_from_measured_steps_and_follows_the_device():
    def measured(token_ns: int) -> list:
        steps = [([1] * n, [100] * n) for n in (1, 8, 32)] + [([n], [0]) for n in (2, 16, 64, 128, 256, 512)]
        works = [step_work(SHAPE, new, past, len(new)) for new, past in steps]
        return [(work, True, 4_000_000 + token_ns * work.tokens) for work in works]

    budget = LearningBudget(MOST, SHAPE, StepTarget(50), measured(500_000))
    before = budget.beside(running(*[100] * 8), running(0))
    assert before == pytest.approx((40 - 4) / 0.5, abs=3)
    for number in range(20 * LearningBudget.BLOCK):  # the device has become half as fast
        prompt = [64] if number % 2 else []
        new = [1] * 8 + prompt
        plan = SimpleNamespace(scheduled=[SimpleNamespace(new_tokens=n, past_tokens=100 if n == 1 else 0) for n in new])
        outcome = StepOutcome({}, 0, 0, 0, 4_000_000 + 1_000_000 * sum(new), 0, logit_rows=len(new))
        budget.observe(plan, outcome)
    assert budget.beside(running(*[100] * 8), running(0)) == pytest.approx((40 - 4) / 1.0, abs=6)


@pytest.mark.parametrize("eager", [True, False])
def test_the_scalar_prediction_is_that_of_the_features(eager):
    model, dice = StepTimeModel(), random.Random(1)
    sizes = [(dice.choice([0, 1, 3, 90, 400]), dice.randint(0, 20)) for _ in range(StepTimeModel.BLOCK)]
    works = [step_work(SHAPE, [1] * decodes + [new], [9] * (decodes + 1), decodes) for new, decodes in sizes]
    found = np.array([features(work, eager=eager) for work in works])
    model.observe_all(found, 1000 * (50 + found[:, 7:].sum(axis=1)))
    works.append(step_work(SHAPE, [2000], [0], 1))  # rows beyond all that it has seen
    for work in works:
        predicted = model.predict(features(work, eager=eager))
        if predicted is None and work.tokens < 2000:  # fewer rows than enough steps had: a search goes on below them
            predicted = np.nan_to_num(model.coefficients()) @ features(work, eager=eager)
        assert model.predict_work(work, eager=eager) == pytest.approx(predicted)
    assert model.predict_work(works[-1], eager=eager) is None


def test_the_scheduler_asks_only_where_prompts_share_a_step_with_decodes():
    budget = TimedBudget(32, SHAPE.windows, StepTarget(10), Device(step_ns=1_000_000, token_ns=300_000, pair_ns=0))
    simulation = Simulation(max_num_batched_tokens=budget)
    simulation.receive(submit("a", list(range(20)), 12))
    simulation.step()
    assert simulation.last_step_record().budget == 32, "nobody decodes"
    simulation.receive(submit("b", list(range(100, 140)), 4))
    simulation.step()
    record = simulation.last_step_record()
    assert record.budget < 32 and sum(record.new_tokens) == record.budget, "8 ms hold the decode and 16 tokens or more"
    simulation.drain()
    assert len(simulation.published.tokens["b"]) == 4
    assert simulation.last_step_record().budget == 32, "only decodes"


def test_a_number_stays_a_number_and_auto_is_planned_for_its_largest_step():
    assert EngineConfig(model="").max_num_batched_tokens == "auto"
    assert engine_config({"model": "", "max_num_batched_tokens": "512"}).max_num_batched_tokens == 512
    assert largest_step_tokens(EngineConfig(model=""), "cuda") == 2048
    assert largest_step_tokens(EngineConfig(model="", max_num_seqs=300), "cpu") == 600
    assert largest_step_tokens(EngineConfig(model="", max_num_batched_tokens=7), "cpu") == 7
