"""How certain the model is where a token is drawn, looked at in one draw of every EVERY steps, and not more often than
every MOST_OFTEN_NS: so rarely, because it reads a whole row of logits, and in some cases sorts it."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.sampling import GREEDY_BELOW
from engine.token.sampling.controls import Drawer
from engine.token.sampling.sampler import Truncation, above_floors, truncate

EVERY = 192  # steps that draw; of fewer than one in a hundred, or the 99th percentile of their time would tell it
MOST_OFTEN_NS = 500_000_000  # else, of steps of a third of a millisecond, it would be nearly a hundredth of their time


@dataclass(frozen=True, slots=True)
class Look:
    """At one row of a step's logits, and how it draws."""

    row: int
    greedy: bool
    temperature: torch.Tensor  # [1, 1] float64 on the device; 1 where the draw is greedy
    truncation: Truncation


class CertaintyProbe:
    """Chooses the draws, each place in the batch in its turn. A request whose logits are edited before the draw, by
    penalties, biases or a grammar, is left out: what it draws from is no longer the model's distribution."""

    def __init__(self, vocab_size: int, device: torch.device):
        self._vocab_size = vocab_size
        self._device = device
        self.steps = 0  # that drew since the last look: whoever prepares them counts them
        self._looks = 0
        self._due_ns = 0

    def choose(self, requests: Sequence[Drawer], edits: Callable[[str], bool]) -> Look | None:
        """Asked once `steps` are EVERY. `requests` draw, at least one, in the order of the logits' rows; `edits` says
        of an id whether its logits are edited."""
        now_ns = time.monotonic_ns()
        if now_ns < self._due_ns:
            self.steps -= EVERY // 4  # until then nobody has to ask
            return None
        self.steps, self._due_ns = 0, now_ns + MOST_OFTEN_NS
        self._looks += 1
        plain = [row for row, request in enumerate(requests) if not edits(request.id)]
        return self._look(plain[self._looks % len(plain)], requests) if plain else None

    def _look(self, row: int, requests: Sequence[Drawer]) -> Look:
        params = requests[row].sampling
        greedy = params.temperature < GREEDY_BELOW
        temperature = 1.0 if greedy else params.temperature
        size = self._vocab_size
        values = torch.tensor(
            [
                [
                    temperature,
                    params.min_p,
                    params.top_n_sigma or math.inf,
                    min(params.top_k or size, size),
                    params.top_p,
                ]
            ],
            dtype=torch.float64,
        )
        if self._device.type == "cuda":  # from pinned memory, or the host would wait for the device
            values = values.pin_memory().to(self._device, non_blocking=True)
        temperature, min_p, top_n_sigma, top_k, top_p = values.split(1, dim=1)
        floors, sorts = params.min_p > 0 or params.top_n_sigma > 0, params.top_k > 0 or params.top_p < 1
        truncation = Truncation(
            min_p if floors else None,
            top_n_sigma if floors else None,
            top_k if sorts else None,
            top_p if sorts else None,
        )
        return Look(row, greedy, temperature, truncation)


def certainty(logits: torch.Tensor, look: Look) -> torch.Tensor:
    """[rows, vocab_size] → [2] float64 of the row that is looked at: the entropy in nats of its distribution at the
    request's temperature, before truncation, and the share of the probability that truncation keeps. A greedy draw is
    told at temperature 1, and keeps the one token that it takes."""
    scaled = logits[look.row, None].double() / look.temperature
    probabilities = scaled.softmax(dim=-1)
    entropy = torch.special.entr(probabilities).sum()
    cut = look.truncation
    if look.greedy:
        return torch.stack((entropy, probabilities.amax()))
    if cut.min_p is not None:
        scaled = above_floors(scaled, cut)
    if cut.top_k is None:
        kept = scaled > -torch.inf
    else:
        scaled, order = scaled.sort(dim=-1, descending=True, stable=True)
        kept = truncate(scaled.softmax(dim=-1), cut) > 0
        probabilities = probabilities.gather(-1, order)
    return torch.stack((entropy, (probabilities * kept).sum()))


def told_certainty(found: torch.Tensor | None) -> tuple[list[int], list[int]]:
    """For a record: entropy in thousandths of a nat, kept share in millionths; nothing where nothing was looked at, or
    where the logits were no numbers."""
    if found is None:
        return [], []
    entropy, kept = found.tolist()
    return ([round(1e3 * entropy)], [round(1e6 * kept)]) if math.isfinite(entropy) else ([], [])
