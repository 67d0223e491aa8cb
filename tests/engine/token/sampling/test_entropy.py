"""The entropy of the model's distribution: against torch.distributions, and against the tokens that can be drawn."""

from dataclasses import dataclass, field

import pytest
import torch

from sojourn.engine.sampling import SamplingParams
from sojourn.engine.token.sampling import entropy as entropies
from sojourn.engine.token.sampling.entropy import (
    EVERY,
    LEAST_INTERVAL_NS,
    EntropyProbe,
    entropy_and_mass,
    recorded_entropy,
)
from sojourn.engine.token.sampling.sampler import Sampler
from tests.engine.harness import drain, hand_over, make_engine, submit

CPU = torch.device("cpu")
VOCAB = 40


@dataclass
class Request:
    """What a sampler knows of a request."""

    id: str
    sampling: SamplingParams
    token_ids: list[int] = field(default_factory=lambda: [3, 4, 5])
    prompt_tokens: int = 3


def sample_of(logits: torch.Tensor, **sampling) -> tuple[float, float]:
    request = Request("a", SamplingParams(max_tokens=5, **sampling))
    sample = EntropyProbe(VOCAB, CPU, every=1).sample_row([request], lambda _: False)
    return tuple(entropy_and_mass(logits[None], sample).tolist())


CUTS = [
    {"temperature": 1.0}, {"temperature": 0.4}, {"temperature": 1.7, "top_k": 5}, {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 0.8, "min_p": 0.1}, {"temperature": 1.0, "top_n_sigma": 1.0},
    {"temperature": 1.3, "top_k": 12, "top_p": 0.8, "min_p": 0.02},
]  # fmt: skip


@pytest.mark.parametrize("sampling", CUTS, ids=str)
def test_entropy_is_of_the_distribution_and_nucleus_mass_of_what_can_be_sampled(sampling):
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(5)) * 2
    entropy, kept = sample_of(logits, **sampling)
    distribution = torch.distributions.Categorical(logits=logits.double() / sampling["temperature"])
    assert entropy == pytest.approx(distribution.entropy().item(), abs=1e-9)
    sampler = Sampler(VOCAB, CPU)
    draws = [Request(str(seed), SamplingParams(max_tokens=5, seed=seed, **sampling)) for seed in range(1500)]
    drawn = set(sampler.sample(logits.expand(len(draws), -1), sampler.prepare(draws)).tolist())
    # What is never drawn in so many trials has next to no probability, if it can be drawn at all.
    assert kept == pytest.approx(distribution.probs[sorted(drawn)].sum().item(), abs=5e-3)


def test_a_greedy_row_counts_at_temperature_1_and_keeps_one_token():
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(6))
    entropy, kept = sample_of(logits, temperature=0.0)
    distribution = torch.distributions.Categorical(logits=logits.double())
    assert entropy == pytest.approx(distribution.entropy().item(), abs=1e-9)
    assert kept == pytest.approx(distribution.probs.max().item(), abs=1e-9)


def test_every_place_has_its_turn_and_edited_requests_have_none(monkeypatch):
    monkeypatch.setattr(entropies, "LEAST_INTERVAL_NS", 0)
    requests = [Request(str(row), SamplingParams(max_tokens=5, temperature=1.0)) for row in range(4)]
    probe = EntropyProbe(VOCAB, CPU, every=1)
    samples = [probe.sample_row(requests, lambda request_id: request_id == "2") for _ in range(8)]
    assert {sample.row for sample in samples} == {0, 1, 3}
    assert probe.sample_row(requests[2:3], lambda _: True) is None


def test_samples_are_half_a_second_apart(monkeypatch):
    now_ns = 5
    monkeypatch.setattr(entropies.time, "monotonic_ns", lambda: now_ns)
    request, probe = Request("a", SamplingParams(max_tokens=5)), EntropyProbe(VOCAB, CPU, every=1)
    assert probe.sample_row([request], lambda _: False) is not None
    now_ns += LEAST_INTERVAL_NS - 1
    assert probe.sample_row([request], lambda _: False) is None
    now_ns += 1
    assert probe.sample_row([request], lambda _: False) is not None


def test_numbers_that_are_not_finite_are_not_recorded():
    assert recorded_entropy(None) == recorded_entropy(torch.tensor([torch.nan, 0.5])) == ([], [])
    assert recorded_entropy(torch.tensor([1.5, 0.25])) == ([1500], [250_000])


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_records_of_a_running_engine_hold_it_and_its_tokens_are_the_same(overlap, checkpoints, monkeypatch):
    monkeypatch.setattr(entropies, "LEAST_INTERVAL_NS", 0)
    engine, published = make_engine(checkpoints["llama"], overlap=overlap)
    hand_over(engine, [submit(name, [5, 9, 11], 2 * EVERY + 20, temperature=0.9, top_p=0.9, seed=4) for name in "ab"])
    drain(engine)
    assert published.tokens["a"] == published.tokens["b"]
    samples = [step for step in published.records if step.entropy_millinats]
    assert len(samples) == len(published.records) // EVERY == 2
    for step in samples:
        assert len(step.entropy_millinats) == len(step.nucleus_mass_ppm) == 1
        assert 0 <= step.entropy_millinats[0] <= 1000 * 5.77  # ln 320, the vocabulary
        assert 899_000 <= step.nucleus_mass_ppm[0] <= 1_000_000
