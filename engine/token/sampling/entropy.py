"""The entropy of the model's distribution, sampled from one row of logits in one step of EVERY.

A sample reads a whole row of logits, and may sort it: more often would show in the 99th percentile of step times.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sojourn.engine.compute.buffers import to_device
from sojourn.engine.sampling import GREEDY_BELOW
from sojourn.engine.token.sampling.state import SamplingRequest
from sojourn.engine.token.sampling.truncation import Truncation, above_floors, truncate, truncation_of

EVERY = 192  # steps that sample a token
LEAST_INTERVAL_NS = 500_000_000  # between two entropy samples


@dataclass(frozen=True, slots=True)
class EntropySample:
    """Which row of a step's logits is read, and how its token is sampled."""

    row: int
    greedy: bool
    temperature: torch.Tensor  # [1, 1] float64 on the device; 1 where greedy
    truncation: Truncation


class EntropyProbe:
    """Chooses the rows, each place in the batch in its turn. A request whose logits are edited by penalties, biases or
    a grammar is left out: it does not sample from the model's distribution."""

    def __init__(self, vocab_size: int, device: torch.device, every: int = EVERY):
        self._vocab_size = vocab_size
        self._device = device
        self._every = every
        self._steps = 0  # since the last sample
        self._num_samples = 0
        self._due_ns = 0

    def sample_row(
        self,
        requests: Sequence[SamplingRequest],
        edits: Callable[[str], bool],
        drafts: Sequence[tuple[int, ...]] | None = None,
    ) -> EntropySample | None:
        """The sample of a step, or None. `requests` are sampled, in the order of the logits' rows; `edits` says of an
        id whether its logits are edited. Rows behind `drafts` are left out: their token may be dropped."""
        self._steps += 1
        if self._steps < self._every or (now_ns := time.monotonic_ns()) < self._due_ns:
            return None
        self._steps, self._due_ns = 0, now_ns + LEAST_INTERVAL_NS
        self._num_samples += 1
        plain = [
            row for row, request in enumerate(requests) if not edits(request.id) and (drafts is None or not drafts[row])
        ]
        return self._sample(plain[self._num_samples % len(plain)], requests) if plain else None

    def _sample(self, row: int, requests: Sequence[SamplingRequest]) -> EntropySample:
        params = requests[row].sampling
        greedy = params.temperature < GREEDY_BELOW
        temperature = self._column([1.0 if greedy else params.temperature])
        return EntropySample(row, greedy, temperature, truncation_of([params], self._vocab_size, self._column))

    def _column(self, values: list[float]) -> torch.Tensor:
        return to_device(torch.tensor(values, dtype=torch.float64)[:, None], self._device)


def entropy_and_mass(logits: torch.Tensor, sample: EntropySample) -> torch.Tensor:
    """[rows, vocab_size] → [2] float64 of the sampled row: the entropy in nats of its distribution at the request's
    temperature, before truncation, and the share of the probability that truncation leaves. A greedy row counts at
    temperature 1, and leaves the one token that it takes."""
    scaled = logits[sample.row, None].double() / sample.temperature
    probabilities = scaled.softmax(dim=-1)
    entropy = torch.special.entr(probabilities).sum()
    truncation = sample.truncation
    if sample.greedy:
        return torch.stack((entropy, probabilities.amax()))
    if truncation.min_p is not None:
        scaled = above_floors(scaled, truncation)
    if truncation.top_k is None:
        left = scaled > -torch.inf
    else:
        scaled, order = scaled.sort(dim=-1, descending=True, stable=True)
        left = truncate(scaled.softmax(dim=-1), truncation) > 0
        probabilities = probabilities.gather(-1, order)
    return torch.stack((entropy, (probabilities * left).sum()))


def recorded_entropy(found: torch.Tensor | None) -> tuple[list[int], list[int]]:
    """For a record: entropy in thousandths of a nat, remaining mass in millionths. Empty lists without a sample, or
    where the logits were not finite."""
    if found is None:
        return [], []
    entropy, mass = found.tolist()
    return ([round(1e3 * entropy)], [round(1e6 * mass)]) if math.isfinite(entropy) else ([], [])
