"""What the records say about the prefix cache: what it hit, what it missed and why, and what another size would hit.

Pure functions over rows of `requests` (alone, or joined with the client's) and of `steps`. Shares are of the prompt
tokens of the rows that asked the cache. None, or an empty table, stands where a run has no such records.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from sojourn.metrics.memory.miss_ratio import INFINITE, miss_ratio_curve
from sojourn.metrics.memory.prefix_outcomes import hit_tokens
from sojourn.metrics.memory.prompt_repeats import SHINGLE_TOKENS
from sojourn.metrics.request.waits import reasons

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # tokens
ENOUGH = 0.9  # of what would be hit at best: the last tenth costs most


@dataclass(frozen=True, slots=True)
class PrefixUse:
    """What became of the prompt tokens."""

    prompt_tokens: int
    outcomes: dict[str, float]  # of metrics.memory.prefix_outcomes.PREFIX_OUTCOMES → share
    infinite_share: float  # what a cache without eviction would have hit

    @property
    def hit_share(self) -> float:
        return hit_tokens(self.outcomes)


@dataclass(frozen=True, slots=True)
class PoolCurve:
    """Hit share by the size of the pool, between the measured sizes a straight line."""

    pool_blocks: int
    blocks: list[float]  # ascending, from 0
    hit_shares: list[float]
    infinite_share: float

    def hit_share(self, blocks: float) -> float:
        """Of a pool of this size; beyond the largest measured one, what that one has."""
        return float(np.interp(blocks, self.blocks, self.hit_shares))

    def blocks_for(self, share_of_infinite: float = ENOUGH) -> int | None:
        """The smallest measured pool that hits this part of what an infinite cache does. Between two of them nothing is
        known: where prompts take turns, the last blocks that are missing cost all hits. None if no measured size does,
        or if there is nothing to hit."""
        wanted = share_of_infinite * self.infinite_share
        at = next((i for i, hit in enumerate(self.hit_shares) if hit >= wanted - 1e-12), None)
        return None if at is None or wanted <= 0 else int(np.ceil(self.blocks[at]))


@dataclass(frozen=True, slots=True)
class SharedLengths:
    """The prefixes that prompts share with an earlier request, to the token. Counts also what a request that was still
    running had, which no cache could have given at that moment."""

    below_block: float  # of the requests that share a token or more, those whose prefix is shorter than a block
    p50_tokens: float  # of these requests
    shared_share: float
    caught: dict[int, float]  # block size → share of the prompt tokens that whole blocks would catch

    def block_size_for(self, share_of_shared: float = ENOUGH) -> int | None:
        """The largest size that catches this part of what single tokens would; None where nothing is shared."""
        wanted = share_of_shared * self.caught[1]
        return max((size for size, caught in self.caught.items() if caught >= wanted), default=1) if wanted else None


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """Text that prompts have in common behind something that differs (metrics/memory/prompt_repeats.py). Of the rows
    whose repeats were counted."""

    movable_share: float  # had stood in an earlier prompt, and could stand first
    movable_requests: float  # share of the requests that have such a part
    diverged_p50_tokens: float | None  # of these requests, the length of the prefix that they share

    @property
    def is_early(self) -> bool:
        """What they share as a prefix is less than a shingle, though there is more to share."""
        return self.diverged_p50_tokens is not None and self.diverged_p50_tokens < SHINGLE_TOKENS


@dataclass(frozen=True, slots=True)
class Eviction:
    """What was evicted and missed later."""

    missed_share: float  # of the prompt tokens
    one_shot_share: float  # of the missed ones: taken by requests that share no block with any other
    by_class: dict[str, float]  # class of the request that took the room → share of the missed tokens
    reuse_distance_p50_blocks: float | None  # sampled, hits and misses
    beyond_pool_share: float | None  # of these distances, those that exceed the pool
    reuse_gap_p50_s: float | None  # of hits: last reader gone → read again
    evicted_idle_p50_s: float | None  # last reader gone → evicted

    @property
    def thrashes(self) -> bool:
        """Half of what is asked for again would not fit, or is evicted before it is usually asked for."""
        by_distance = (self.beyond_pool_share or 0.0) >= 0.5
        both = self.reuse_gap_p50_s is not None and self.evicted_idle_p50_s is not None
        return by_distance or (both and self.evicted_idle_p50_s < self.reuse_gap_p50_s)


def prefix_use(requests: pd.DataFrame) -> PrefixUse | None:
    rows = select_lookups(requests)
    totals: Counter[str] = Counter()
    for cell in rows.prefix_outcomes if len(rows) else ():
        totals.update(reasons(cell))
    tokens = totals.total()
    if not tokens:
        return None
    infinite = float(_numbers(rows, "infinite_hit_tokens").fillna(0).sum())
    return PrefixUse(tokens, {name: count / tokens for name, count in totals.items()}, infinite / tokens)


def pool_curve(requests: pd.DataFrame, pool_blocks: int) -> PoolCurve | None:
    curve = miss_ratio_curve(select_lookups(requests)) if len(select_lookups(requests)) else []
    sizes = [point for point in curve if point.ratio != INFINITE]
    if not sizes or pool_blocks <= 0:
        return None
    return PoolCurve(
        pool_blocks=pool_blocks,
        blocks=[0.0, *(point.ratio * pool_blocks for point in sizes)],
        hit_shares=[0.0, *(point.hit_ratio for point in sizes)],
        infinite_share=curve[-1].hit_ratio,
    )


def shared_lengths(requests: pd.DataFrame, block_size: int) -> SharedLengths | None:
    rows = select_lookups(requests)
    shared = _numbers(rows, "prefix_shared_tokens")
    rows, shared = rows[shared.notna()], shared.dropna().to_numpy()
    prompt = _prompt_tokens(rows)
    if not len(rows) or not prompt.sum():
        return None
    usable = np.minimum(shared, np.maximum(prompt - 1, 0))  # the last token is always computed
    sharing = shared[shared > 0]
    sizes = sorted({*BLOCK_SIZES, block_size})
    return SharedLengths(
        below_block=float((sharing < block_size).mean()) if len(sharing) else 0.0,
        p50_tokens=float(np.median(sharing)) if len(sharing) else 0.0,
        shared_share=float(usable.sum() / prompt.sum()),
        caught={size: float((usable // size * size).sum() / prompt.sum()) for size in sizes},
    )  # fmt: skip


def prompt_order(requests: pd.DataFrame) -> PromptOrder | None:
    rows = select_lookups(requests)
    movable = _numbers(rows, "movable_tokens")
    rows, movable = rows[movable.notna()], movable.dropna().to_numpy()
    prompt = _prompt_tokens(rows)
    if not len(rows) or not prompt.sum():
        return None
    shared = _numbers(rows, "prefix_shared_tokens").to_numpy()[movable > 0]
    # A word that stands before the part by chance hides where it begins: such a prompt repeats as much as the others
    usual = float(np.median(movable[movable > 0])) if (movable > 0).mean() >= 0.5 else np.inf
    repeated = _numbers(rows, "repeated_tokens").fillna(0).to_numpy()
    movable = np.where((movable == 0) & (repeated >= ENOUGH * usual), np.minimum(repeated, usual), movable)
    return PromptOrder(
        movable_share=float(movable.sum() / prompt.sum()),
        movable_requests=float((movable > 0).mean()),
        diverged_p50_tokens=float(np.median(shared)) if len(shared) else None,
    )


def eviction(requests: pd.DataFrame, steps: pd.DataFrame, block_size: int) -> Eviction | None:
    """`requests` should be all that ran, warm-up too: one that is missing counts as no reader of any other."""
    use = prefix_use(requests)
    if use is None:
        return None
    rows = select_lookups(requests)
    taken: Counter[str] = Counter()
    for cell in rows.evicted_by if "evicted_by" in rows else ():
        for name, tokens in reasons(cell).items():
            taken[name.split("#", 1)[0]] += tokens
    one_shot, classes = one_shots(rows, block_size), dict(zip(rows.request_id, _classes(rows), strict=True))
    by_class: Counter[str] = Counter()
    for name, tokens in taken.items():
        by_class[classes.get(name, "")] += tokens
    whole = taken.total()
    pool = pool_blocks(steps)
    distances = _flat(steps, "reuse_distance_blocks")
    return Eviction(
        missed_share=use.outcomes.get("miss_evicted", 0.0),
        one_shot_share=sum(tokens for name, tokens in taken.items() if name in one_shot) / whole if whole else 0.0,
        by_class={name: tokens / whole for name, tokens in by_class.most_common()},
        reuse_distance_p50_blocks=float(np.median(distances)) if len(distances) else None,
        beyond_pool_share=float((distances >= pool).mean()) if len(distances) and pool else None,
        reuse_gap_p50_s=_median_s(_flat(steps, "reuse_gap_ns")),
        evicted_idle_p50_s=_median_s(_flat(steps, "evicted_idle_ns")),
    )


def one_shots(requests: pd.DataFrame, block_size: int) -> set[str]:
    """Requests that share less than a block with any before them, and that no other shares a block with. Empty where a
    run does not record what is shared."""
    if "prefix_source" not in requests:
        return set()
    shared = _numbers(requests, "prefix_shared_tokens").fillna(0)
    sources = set(requests.prefix_source[shared >= block_size].dropna())
    return {name for name, tokens in zip(requests.request_id, shared, strict=True)
            if tokens < block_size and name not in sources}  # fmt: skip


def select_lookups(requests: pd.DataFrame) -> pd.DataFrame:
    """The rows whose prompt was looked up in the prefix cache, or in its shadow."""
    if "prefix_outcomes" not in requests:
        return requests.iloc[:0]
    return requests[np.array([bool(reasons(cell)) for cell in requests.prefix_outcomes], bool)]


def pool_blocks(steps: pd.DataFrame) -> int:
    """Blocks of the pool; 0 without steps."""
    parts = ("blocks_free", "blocks_active", "blocks_reusable")
    return int(sum(steps[part].astype("float64") for part in parts).max()) if len(steps) else 0


def _prompt_tokens(rows: pd.DataFrame) -> np.ndarray:
    """As the server counts them, also where they are joined with the client's."""
    return np.array([sum(reasons(cell).values()) for cell in (rows.prefix_outcomes if len(rows) else ())], "float64")


def _classes(rows: pd.DataFrame) -> Sequence[str]:
    name = "server_klass" if "server_klass" in rows else "klass"
    return rows[name].fillna("").to_list() if name in rows else [""] * len(rows)


def _numbers(rows: pd.DataFrame, name: str) -> pd.Series:
    if name not in rows:
        return pd.Series(float("nan"), index=rows.index, dtype="float64")
    return rows[name].astype("float64")


def _flat(steps: pd.DataFrame, name: str) -> np.ndarray:
    cells = [cell for cell in steps[name] if cell is not None and len(cell)] if name in steps else []
    return np.concatenate(cells).astype("float64") if cells else np.array([])


def _median_s(ns: np.ndarray) -> float | None:
    return float(np.median(ns)) / 1e9 if len(ns) else None
