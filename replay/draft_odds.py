"""What drafts gave in a run.

A proposer that is asked for drafts finds some with a probability, and then as many as were asked for. Each position has
a probability that a draft is accepted, given that those before it were. A request has its own probabilities. Few drafts
of a request draw them towards those of the run.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from sojourn.metrics.statistics.relative_fit import fitted

MOST_DRAFTS = 16  # in one step
RUN_WEIGHT = 4.0  # trials that the run's own mean counts as, for a request
LOOKUP_DRAFTS = 4  # tokens that `lookup_steps` verifies in a step
LOOKUP_ACCEPTANCE = 0.8  # of each draft that prompt lookup found: docs/results/speculation.md has 176 of 210
LOOKUP_NS = 20_000.0  # of a request that prompt lookup is asked for; on the host


@dataclass(frozen=True, slots=True)
class Odds:
    """Of one request, or of a run."""

    found: float  # the proposer has drafts when it is asked
    accepted: tuple[float, ...]  # at each position, that all drafts up to it are accepted [MOST_DRAFTS]


@dataclass(frozen=True, slots=True)
class DraftModel:
    """What a run tells of one proposer's drafts."""

    proposer: str
    mean: Odds
    requests: Mapping[str, Odds] = field(default_factory=dict)  # by id
    step_ns: float = 0.0  # of a step that asks for drafts
    token_ns: float = 0.0  # of each draft that is asked for
    request_ns: float = 0.0  # of each request for which drafts are asked
    known_positions: int = MOST_DRAFTS  # beyond them each draft is accepted as often as the last known one
    sampled: int | None = None  # requests whose outputs were searched; None: the drafts were verified


def recorded_drafts(steps: pd.DataFrame, proposer: str) -> DraftModel | None:
    """From the step records of a run with speculation; None where no step asked for a draft."""
    if "drafts_wanted" not in steps or not steps.drafts_wanted.sum():
        return None
    verified = _verified(steps)
    tried, accepted = _by_position(verified)
    known = int((tried > 0).sum())
    mean_rates = _conditional(tried, accepted, np.full(MOST_DRAFTS, np.nan), 0.0)
    found = min(1.0, len(verified) / max(float(_asked(steps).sum()), 1.0))
    requests = {}
    asked_of = _asked_by_request(steps)
    for name, rows in verified.groupby("request"):
        own = _conditional(*_by_position(rows), mean_rates, RUN_WEIGHT)
        own_found = (len(rows) + RUN_WEIGHT * found) / (max(asked_of.get(name, 0.0), len(rows)) + RUN_WEIGHT)
        requests[str(name)] = Odds(own_found, tuple(np.cumprod(own).tolist()))
    for name, asked in asked_of.items():  # asked in vain
        if name not in requests:
            own_found = RUN_WEIGHT * found / (asked + RUN_WEIGHT)
            requests[name] = Odds(own_found, tuple(np.cumprod(mean_rates).tolist()))
    step_ns, token_ns = _proposer_ns(steps)
    mean = Odds(found, tuple(np.cumprod(mean_rates).tolist()))
    return DraftModel(proposer, mean, requests, step_ns, token_ns, known_positions=max(known, 1))


def lookup_drafts(frame: pd.DataFrame) -> DraftModel | None:
    """What prompt lookup would have given, from the `lookup_steps` of a sample of requests; None without a sample.

    The sample tells tokens a step. How they divide into finding and accepting is a guess, LOOKUP_ACCEPTANCE.
    """
    if "lookup_steps" not in frame or not (sampled := frame[frame.lookup_steps.notna()]).shape[0]:
        return None
    steps = sampled.lookup_steps.astype(float)
    outputs = sampled.server_output_tokens.astype(float)
    per_step = (outputs - steps).clip(lower=0) / (steps - 1).clip(lower=1)
    whole = float((outputs - steps).clip(lower=0).sum() / max(float((steps - 1).clip(lower=0).sum()), 1.0))
    ids = sampled.request_id.astype(str)
    requests = {name: _lookup_odds(each) for name, each in zip(ids, per_step, strict=True)}
    return DraftModel("ngram", _lookup_odds(whole), requests, request_ns=LOOKUP_NS, sampled=len(sampled))


def _lookup_odds(accepted_per_step: float) -> Odds:
    """Odds under which a step with LOOKUP_DRAFTS accepts so many tokens."""
    rates = np.linspace(LOOKUP_ACCEPTANCE, 1.0, 101)
    expected = sum(rates**position for position in range(1, LOOKUP_DRAFTS + 1))
    rate = float(np.interp(accepted_per_step, expected, rates))
    found = min(1.0, accepted_per_step / float(expected[0]))
    return Odds(found, tuple((rate ** np.arange(1, MOST_DRAFTS + 1)).tolist()))


def _verified(steps: pd.DataFrame) -> pd.DataFrame:
    """A row a sequence and step that verified drafts: `request`, `drafts`, `accepted`. The next step of a sequence says
    how far the last one came, so its last step is missing, and those before a preemption."""
    items = steps[["request_ids", "new_tokens", "past_tokens", "kinds"]].explode(list(_LISTS), ignore_index=True)
    items = items.rename(columns={"request_ids": "sequence", "new_tokens": "new", "past_tokens": "past"})
    items = items.astype({"new": "int64", "past": "int64"})
    items["next"] = items.groupby("sequence").past.shift(-1)
    rows = items[(items.kinds == "verify") & (items.next > items.past)]
    accepted = np.minimum(rows.next - rows.past, rows.new) - 1
    request = rows.sequence.str.partition("#")[0]
    return pd.DataFrame({"request": request, "drafts": rows.new - 1, "accepted": accepted.astype("int64")})


_LISTS = ("request_ids", "new_tokens", "past_tokens", "kinds")


def _by_position(verified: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Drafts that could be accepted, as those before them were, and that were, [MOST_DRAFTS] each."""
    positions = np.arange(MOST_DRAFTS)
    drafts, accepted = (verified[name].to_numpy()[:, None] for name in ("drafts", "accepted"))
    tried = (drafts > positions) & (accepted >= positions)
    return tried.sum(axis=0), (tried & (accepted > positions)).sum(axis=0)


def _conditional(tried: np.ndarray, accepted: np.ndarray, prior: np.ndarray, weight: float) -> np.ndarray:
    """Acceptance at each position given those before it; of a position that nobody tried, that of the one before."""
    with np.errstate(invalid="ignore", divide="ignore"):
        rates = (accepted + (weight * prior if weight else 0.0)) / (tried + weight)
    return pd.Series(rates).ffill().fillna(0.0).to_numpy()


def _asked(steps: pd.DataFrame) -> pd.Series:
    """Sequences of each step for which drafts were wanted."""
    refused = steps.undrafted.map(lambda counts: sum(dict(counts).values()) if counts is not None else 0)
    return (steps.logit_rows - steps.drafted_tokens - refused).clip(lower=0).where(steps.drafts_wanted > 0, 0)


def _asked_by_request(steps: pd.DataFrame) -> dict[str, float]:
    """How often drafts were wanted for each request. A step says for how many sequences, not for which."""
    sampling = (steps.logit_rows - steps.drafted_tokens).clip(lower=1)
    share = pd.DataFrame({"sequence": steps.request_ids, "kind": steps.kinds, "share": _asked(steps) / sampling})
    items = share.explode(["sequence", "kind"], ignore_index=True)
    items = items[items.kind.isin(("decode", "verify"))]
    by_request = items.groupby(items.sequence.str.partition("#")[0]).share.sum()
    return {str(name): float(asked) for name, asked in by_request.items()}


def _proposer_ns(steps: pd.DataFrame) -> tuple[float, float]:
    """Of a step that asks, and of each draft that it asks for."""
    asking = steps[steps.drafts_wanted > 0]
    wanted = asking.drafts_wanted.to_numpy(dtype=float)
    step_ns, token_ns = fitted(np.stack([np.ones(len(wanted)), wanted], axis=1), asking.draft_ns.to_numpy(dtype=float))
    return float(step_ns), float(token_ns)
