"""The KV lens of events alone: what was stored again after it had been evicted, and what more memory would have kept.

Hits are not in events; a server that counts its lookups makes rates of the blocks."""

import copy
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from sojourn.live.kv_lens.document import SIZES, CachePool, CurvePoint, Kind, KvLens, Taker, Times
from sojourn.live.kv_lens.takers import MOST_TAKERS, make_taker
from sojourn.live.kv_lens.words import headline_of
from sojourn.metrics.memory.kv_event_wire import GPU
from sojourn.metrics.memory.pool_history import CHAIN, NAMELESS, BlockHistory, PoolHistory
from sojourn.metrics.statistics.log_histogram import LogHistogram

NO_HITS = "hits are not in KV events: give the server's address with --metrics, or the records of its requests"
NO_SMALLER = "what less memory would hit follows from the order of hits, which KV events do not show"
OUTPUT_COUNTS = "a block counts as computed again also where an answer repeated an evicted one word for word"


class Lookups(msgspec.Struct, frozen=True):
    """What a server counted of its lookups while its events were read."""

    queried_tokens: float
    hit_tokens: float


class Baseline(msgspec.Struct, frozen=True):
    """What a pool had seen when somebody began to count lookups."""

    stored_again: int
    places: LogHistogram


def baseline_of(history: BlockHistory) -> dict[tuple[str, str], Baseline]:
    return {key: Baseline(pool.stored_again, copy.deepcopy(pool.places)) for key, pool in history.pools.items()}


def lens_of_events(
    history: BlockHistory, name: str, *, lookups: Lookups | None, pool_blocks: int | None,
    baseline: Mapping[tuple[str, str], Baseline] | None = None, warnings: Sequence[str] = (),
) -> KvLens:  # fmt: skip
    """`pool_blocks`: what the server says; else the most blocks that it held at once stand for it.

    `baseline`: where lookups were counted from a later moment on than the events.
    """
    savings = _savings_of(history, baseline if baseline and lookups is not None else {})
    device = [each.pool for each in savings]
    size = next((pool.block_size for pool in device if pool.block_size), None)
    blocks = pool_blocks or sum(pool.peak for pool in device) or None
    hits, queried = (lookups.hit_tokens, lookups.queried_tokens) if lookups is not None else (0.0, 0.0)
    infinite_hits = hits + sum(each.by(None) for each in savings) * (size or 0)
    lens = KvLens(
        name=name,
        source="events" if lookups is None else "events and metrics",
        headline="",
        seconds=max((pool.seconds for pool in history.pools.values()), default=0.0),
        block_size=size,
        pool_blocks=blocks,
        pool_is_peak=pool_blocks is None,
        lookups=None,
        queried_tokens=int(queried) or None,
        hit_rate=hits / queried if queried else None,
        infinite_hit_rate=_rate(infinite_hits, queried),
        curve=_curve(savings, blocks, size or 0, hits, queried),
        curve_error=None,
        enough=[],
        outcomes={},
        times=_times_of(
            age_when_evicted=[pool.lives for pool in device], evicted_before_needed=[pool.gaps for pool in device]
        ),
        reuse=None,
        takers=_takers(device, size or 0),
        pools=pools_of(history),
        worth=None,
        unknown=_unknown(history, lookups),
        warnings=[*warnings, *_warnings(history)],
    )
    return headline_of(lens)


def pools_of(history: BlockHistory) -> list[CachePool]:
    return [
        CachePool(
            server=server, medium=medium, block_size=pool.block_size, seconds=pool.seconds, held=pool.held,
            peak=pool.peak, stored=pool.stored, stored_again=pool.stored_again, removed=pool.removed,
            removed_unknown=pool.removed_unknown, cleared=pool.cleared, lost_messages=pool.lost,
            forgotten=pool.forgotten,
        )
        for (server, medium), pool in sorted(history.pools.items())
    ]  # fmt: skip


class _Savings:
    """What more memory would have saved one pool, since the baseline."""

    def __init__(self, pool: PoolHistory, before: Baseline | None):
        self.pool, self._before = pool, before

    def by(self, more_blocks: float | None) -> int:
        """Blocks; None is a cache without eviction."""
        pool, before = self.pool, self._before
        if more_blocks is None:
            return pool.stored_again - (before.stored_again if before is not None else 0)
        return pool.saved_by(more_blocks) - (before.places.below(more_blocks) if before is not None else 0)


def _curve(
    savings: list[_Savings], blocks: int | None, size: int, hits: float, queried: float
) -> list[CurvePoint]:  # fmt: skip
    """This pool and larger ones. Of several servers each has its share of the memory."""
    if blocks is None or not size:
        return []
    found = []
    for ratio in (*(ratio for ratio in SIZES if ratio >= 1), None):
        more = None if ratio is None else (ratio - 1) * blocks / len(savings)
        saved = sum(each.by(more) for each in savings)
        found.append(
            CurvePoint(
                ratio=ratio, blocks=None if ratio is None else round(ratio * blocks), saved_tokens=saved * size,
                hit_rate=_rate(hits + saved * size, queried),
            )
        )  # fmt: skip
    return found


def _savings_of(history: BlockHistory, baseline: Mapping[tuple[str, str], Baseline]) -> list[_Savings]:
    """Of each server's device."""
    return [_Savings(pool, baseline.get(key)) for key, pool in history.pools.items() if key[1] == GPU]


def _rate(hits: float, queried: float) -> float | None:
    return min(1.0, hits / queried) if queried else None


def _times_of(**histograms: list[LogHistogram]) -> dict[str, Times]:
    found = {}
    for name, of_pools in histograms.items():
        largest = max(of_pools, key=lambda each: each.count, default=None)  # the server with the most evictions
        if largest is not None and largest.count:
            p10, p50, p90 = ((largest.quantile(share) or 0.0) / 1e9 for share in (0.1, 0.5, 0.9))
            found[name] = Times(blocks=largest.count, p10_s=p10, p50_s=p50, p90_s=p90)
    return found


def _takers(device: list[PoolHistory], size: int) -> list[Taker]:
    taken: Counter[str] = Counter()
    victims: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for pool in device:
        taken.update(pool.taken_by)
        for (name, victim), blocks in pool.missed_by.items():
            victims[name][victim] += blocks
    order = sorted(taken, key=lambda name: (-victims[name].total(), -taken[name]))
    return [
        make_taker(name or NAMELESS, _kind(name), taken[name], size * victims[name].total(), victims[name])
        for name in order[:MOST_TAKERS]
    ]


def _kind(name: str) -> Kind:
    if name in ("", NAMELESS):
        return "others"
    return "chain" if name.startswith(CHAIN) else "session"


def _unknown(history: BlockHistory, lookups: Lookups | None) -> list[str]:
    return [*([NO_HITS] if lookups is None else []), NO_SMALLER, OUTPUT_COUNTS] if history.pools else []


def _warnings(history: BlockHistory) -> list[str]:
    found = []
    pools = history.pools.values()
    if lost := max((pool.lost for pool in pools), default=0):
        found.append(
            f"{lost:,} message{'s were' if lost > 1 else ' was'} lost: what was held then counts as unknown, so the "
            "figures are lower bounds"
        )
    if forgotten := sum(pool.forgotten for pool in pools):
        found.append(f"{forgotten:,} evicted blocks are no longer remembered; if they come back, they look new")
    if unknown := sum(pool.removed_unknown for pool in pools):
        found.append(f"{unknown:,} evicted blocks were stored before the record began; their ages are not known")
    return found
