"""What the device of a replay computes: tokens without a text, drafts by their odds, and copies by their bytes.

Every place of a request has its own seeded draw, which is the same in all replays of a run: another batch has the same
text.
"""

from collections.abc import Callable
from hashlib import blake2b

from sojourn.engine.request.plan import ScheduledTokens, StepPlan
from sojourn.engine.request.request import Request
from sojourn.engine.techniques.tiers.transfers import Transfers
from sojourn.replay.draft_odds import DraftModel, Odds
from sojourn.replay.simulated_runner import Computed
from sojourn.replay.simulated_tiers import SimulatedTiers

FOUND, ACCEPTED = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03  # salts of the two draws


class ReplayedModel:
    """`hashes_of` has the chain hashes of all blocks that a sequence will ever fill, where they are known; `drafts` and
    `tiers` are None where the settings have none."""

    def __init__(
        self, hashes_of: Callable[[str], list[bytes] | None], drafts: "ReplayedDrafts | None" = None,
        tiers: SimulatedTiers | None = None,
    ) -> None:  # fmt: skip
        self._hashes_of, self._drafts, self._tiers = hashes_of, drafts, tiers

    def begin(self, request: Request) -> None:
        """It may be scheduled at once. Its hashes are known before anybody looks for them."""
        if (hashes := self._hashes_of(request.id)) is not None:
            request._hashes = hashes

    def compute(self, plan: StepPlan) -> Computed:
        """Which tokens does not matter, as hashes are known; but two choices of one prompt must not say the same."""
        sampled = {item.request.id: [-item.request.arrival_index] for item in plan.scheduled if item.samples}
        if self._drafts is not None:
            for item in plan.scheduled:
                if item.drafts:
                    sampled[item.request.id] *= 1 + self._drafts.num_accepted(item)
        transfers = plan.parts.get("tiers")
        return Computed(sampled) if transfers is None else Computed(sampled, *self.transfer(transfers))

    def drafts(self, plan: StepPlan, sampled: dict[str, list[int]]) -> tuple[dict[str, tuple[int, ...]], int]:
        if self._drafts is None or not plan.wanted:
            return {}, 0
        drafts, took_ns = self._drafts.proposed(plan)
        return drafts, round(took_ns)

    def transfer(self, transfers: Transfers) -> tuple[float, float]:
        assert self._tiers is not None, "blocks move where there are tiers"
        return self._tiers.copy_ns(transfers)


class ReplayedDrafts:
    """Proposes drafts and accepts them in one replay. `id_of` turns the id of a sequence into that of its call."""

    def __init__(self, model: DraftModel, id_of: Callable[[str], str]) -> None:
        self._model, self._id_of = model, id_of
        self._known: dict[str, tuple[int, Odds]] = {}  # sequence → the seed of its draws, and its odds

    def num_accepted(self, item: ScheduledTokens) -> int:
        """Of the drafts of one sequence in a step."""
        seed, odds = self._of(item.request.id)
        drawn, most = _draw(seed ^ ACCEPTED, item.past_tokens), len(item.drafts)
        return sum([drawn < likely for likely in odds.accepted[:most]])

    def proposed(self, plan: StepPlan) -> tuple[dict[str, tuple[int, ...]], float]:
        """Drafts by sequence for the next step, and the proposer's nanoseconds."""
        drafts = {}
        for item in plan.scheduled:
            count = plan.wanted.get(item.request.id, 0)
            if count:
                seed, odds = self._of(item.request.id)
                if _draw(seed ^ FOUND, item.past_tokens) < odds.found:
                    drafts[item.request.id] = (0,) * count
        model = self._model
        asked = sum(plan.wanted.values())
        took_ns = model.step_ns + model.token_ns * asked + model.request_ns * len(plan.wanted) if asked else 0.0
        return drafts, took_ns

    def _of(self, sequence: str) -> tuple[int, Odds]:
        known = self._known.get(sequence)
        if known is None:
            name = self._id_of(sequence)
            choice = sequence.rpartition(".")[2]
            seed = int.from_bytes(blake2b(f"{name}/{choice}".encode(), digest_size=8).digest())
            known = self._known[sequence] = (seed, self._model.requests.get(name, self._model.mean))
        return known


def _draw(seed: int, place: int) -> float:
    """A number from 0 to 1 for each place: SplitMix64 (Steele et al., 2014)."""
    mixed = (seed + place * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & _MASK
    return (mixed ^ mixed >> 31) / 2**64


_MASK = 2**64 - 1
