"""Draws follow the exact distribution, and a seed gives the same tokens whatever surrounds it."""

import random

import pytest
import torch

from engine.sampling import SamplingParams
from engine.token.sampler import SamplingInputs, sample, uniform
from tests.engine.harness import drain, generate, hand_over, make_engine, submit

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -1.0, -3.0, 1.5])


def made(params, positions, vocab_size: int = 50) -> SamplingInputs:
    return SamplingInputs(list(params), list(positions), vocab_size, torch.device("cpu"))


def exact(temperature: float, top_k: int, top_p: float) -> list[float]:
    """The distribution by its definition, in plain Python."""
    weights = {i: 2.718281828459045 ** (x / temperature) for i, x in enumerate(LOGITS.tolist())}
    ranked = sorted(weights, key=lambda i: -weights[i])[: top_k or None]
    total, kept, mass = sum(weights[i] for i in ranked), [], 0.0
    for i in ranked:
        kept.append(i)
        mass += weights[i] / total
        if mass >= top_p:
            break
    scale = sum(weights[i] for i in kept)
    return [weights[i] / scale if i in kept else 0.0 for i in range(len(LOGITS))]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.5, 0, 1.0), (1.0, 3, 1.0), (1.0, 0, 0.7), (2.0, 5, 0.6)]
)
def test_draws_follow_the_exact_distribution(temperature, top_k, top_p):
    draws = 8000
    params = SamplingParams(max_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p, seed=11)
    inputs = made([params] * draws, range(draws))
    counts = torch.bincount(sample(LOGITS.repeat(draws, 1), inputs), minlength=len(LOGITS)).tolist()
    expected = exact(temperature, top_k, top_p)
    assert all(count == 0 for count, p in zip(counts, expected, strict=True) if p == 0)
    chi_square = sum((count - draws * p) ** 2 / (draws * p) for count, p in zip(counts, expected, strict=True) if p)
    assert chi_square < 29.9  # beyond the 99.99 % point of 7 degrees of freedom; the seed is fixed, so it never flips


def test_truncation_keeps_exactly_the_smallest_set_that_reaches_top_p():
    dice = random.Random(4)
    for _ in range(60):
        top_k, top_p = dice.choice([0, 2, 5]), dice.uniform(0.05, 0.999)
        params = SamplingParams(max_tokens=1, temperature=dice.uniform(0.3, 3), top_k=top_k, top_p=top_p, seed=3)
        drawn = set(sample(LOGITS.repeat(4000, 1), made([params] * 4000, range(4000))).tolist())
        expected = {i for i, p in enumerate(exact(params.temperature, top_k, top_p)) if p > 0}
        likely = {i for i, p in enumerate(exact(params.temperature, top_k, top_p)) if p > 0.005}  # 4000 draws show it
        assert likely <= drawn <= expected


def test_each_position_of_a_sequence_is_drawn_with_its_own_number(checkpoints):
    engine, _ = make_engine(checkpoints["qwen3"])
    hand_over(engine, [submit("a", [5, 6, 7], 3, temperature=1.0, seed=1)])
    drawn = []
    prepare = engine.runner._prepare
    engine.runner._prepare = lambda items: drawn.append(batch := prepare(items)) or batch
    drain(engine)
    assert [batch.sampling.plain.draw.item() for batch in drawn] == [uniform(1, position) for position in (3, 4, 5)]


def test_rows_are_drawn_independently_of_their_neighbours():
    params = [SamplingParams(max_tokens=1, temperature=t, top_k=k, seed=s) for t, k, s in
              [(0.0, 0, 1), (1.0, 0, 2), (0.7, 3, 3), (1.3, 0, 4)]]  # fmt: skip
    torch.manual_seed(0)
    logits = torch.randn(4, 50)
    together = sample(logits, made(params, [9, 9, 9, 9])).tolist()
    alone = [sample(logits[i : i + 1], made([params[i]], [9])).item() for i in range(4)]
    assert together == alone


def test_uniform_numbers_fill_the_interval_and_never_reach_one():
    numbers = [uniform(seed, position) for seed in (0, 1, -5, 2**63 - 1) for position in range(500)]
    assert min(numbers) >= 0 and max(numbers) < 1 and len(set(numbers)) == len(numbers)
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.03  # four standard errors


def test_a_seed_gives_the_same_tokens_alone_in_a_batch_and_after_preemption(checkpoints):
    dice = random.Random(1)
    batch = [[dice.randrange(3, 320) for _ in range(40)] for _ in range(4)]
    warm = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}
    folder = checkpoints["qwen3"]

    def run(prompts: list[list[int]], **settings):
        engine, published = make_engine(folder, **settings)
        hand_over(engine, [submit(f"r{i}", p, 50, seed=i, **warm) for i, p in enumerate(prompts)])
        drain(engine)
        return [published.tokens[f"r{i}"] for i in range(len(prompts))], published

    together, _ = run(batch)
    squeezed, published = run(batch, num_kv_blocks=16, max_model_len=256)
    assert sum(ended.preemptions for ended in published.ended.values()) > 0
    assert squeezed == together
    assert run(batch[:1])[0][0] == together[0]
    assert together[0] != generate(folder, batch[:1], 50, {"seed": 99, **warm})[0][0]
