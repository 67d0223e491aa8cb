"""What share of the prompt tokens the prefix cache had, beside what an infinite cache would have had. Pure.

Measures: cached tokens over prompt tokens of the served requests that tell both, from the server's usage, or from our
engine's own records where usage tells nothing. The ideal is computed from the requests that were sent, after the run.
Cannot measure: why a block was missed (the memory page does, for our engine), and what a chat template adds to prompts.
"""

from dataclasses import dataclass
from typing import Any

import pandas as pd

from sojourn.metrics.run.directory import section

FOREIGN_SHARE = 0.02  # of the prompt tokens: what a chat template puts before all prompts may be as much
KNOWN_BEFORE = (
    "The hit rate exceeds what these prompts share. It is the chat template's, or an earlier run with the same seed "
    "warmed the cache, and latencies look too good. Then restart the server, or take another seed"
)


@dataclass(frozen=True, slots=True)
class PrefixShare:
    """Rates in 0 … 1; None where no side reports them."""

    ideal: float  # an infinite cache, at the granularity of `block_tokens`
    achieved: float | None
    infinite: float | None  # what our engine's shadow index says an infinite cache would have had
    block_tokens: int
    block_tokens_assumed: bool  # the server does not tell its own
    num_requests: int  # that `achieved` rests on

    @property
    def infinite_cache(self) -> str:
        """Which cache the ideal is of, in words."""
        return f"infinite cache, blocks of {self.block_tokens} tokens{' assumed' if self.block_tokens_assumed else ''}"


def prefix_share(meta: dict[str, Any], requests: pd.DataFrame) -> PrefixShare | None:
    """Of the measured requests of a run (client and server joined); None where its load shares nothing and nothing was
    found either."""
    ideal = section(section(meta, "workload"), "prefix")
    if not isinstance(ideal.get("ideal_hit_rate"), int | float):
        return None
    served = requests[requests.status == "ok"]
    cached, prompt = (client_or_server(served, name) for name in ("cached_tokens", "prompt_tokens"))
    known = cached.notna() & prompt.notna()
    shadow = _numbers(served, "infinite_hit_tokens")
    seen = shadow.notna() & prompt.notna()
    achieved = _rate(cached[known], prompt[known])
    if not ideal["ideal_hit_rate"] and not achieved:
        return None
    return PrefixShare(
        ideal=float(ideal["ideal_hit_rate"]), achieved=achieved,
        infinite=_rate(shadow[seen], prompt[seen]), block_tokens=int(ideal.get("block_tokens") or 0),
        block_tokens_assumed=bool(ideal.get("block_tokens_assumed")), num_requests=int(known.sum()),
    )  # fmt: skip


def cache_sentence(share: PrefixShare) -> str:
    """One line for the terminal."""
    ideal = f"ideal {share.ideal:.1%} ({share.infinite_cache})"
    if share.achieved is None:
        return f"Prefix cache: {ideal}; the server does not report what it found"
    sentence = f"Prefix cache: {share.achieved:.1%} of the prompt tokens were cached, {ideal}"
    return f"{sentence}. {KNOWN_BEFORE}" if _above_ideal(share) else sentence


def cache_doubt(meta: dict[str, Any], requests: pd.DataFrame) -> str:
    """Of a run that was one of several: what its server found beyond the ideal; "" where it did not."""
    share = prefix_share(meta, requests)
    return cache_sentence(share) if share and _above_ideal(share) else ""


def _above_ideal(share: PrefixShare) -> bool:
    return share.achieved is not None and share.achieved > share.ideal + FOREIGN_SHARE


def client_or_server(frame: pd.DataFrame, name: str) -> pd.Series:
    """The value that the client received, or else the server's record."""
    return _numbers(frame, name).fillna(_numbers(frame, f"server_{name}"))


def _numbers(frame: pd.DataFrame, name: str) -> pd.Series:
    if name not in frame:
        return pd.Series(float("nan"), index=frame.index)
    return frame[name].astype("float64")


def _rate(found: pd.Series, requested: pd.Series) -> float | None:
    return float(found.sum() / requested.sum()) if len(requested) and requested.sum() else None


def workload_lines(meta: dict[str, Any], requests: pd.DataFrame) -> list[str]:
    """What a reader of the results has to know of the workload: cache rates, scaled blocks, rows left out."""
    share, notes = prefix_share(meta, requests), section(meta, "workload").get("notes", [])
    return ([cache_sentence(share)] if share else []) + [str(note) for note in notes]
