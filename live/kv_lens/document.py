"""What a KV lens says, as data: the terminal, the app, `--json`, notebooks and the MCP tool all show this."""

from typing import Literal, NamedTuple

import msgspec

from sojourn.metrics.prediction import Prediction

Source = Literal["records", "events", "events and metrics"]
SIZES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)  # of the curve, as multiples of the pool
# What `times` holds, and what each says.
TIMES = {
    "age_when_evicted": "stored → evicted",
    "idle_when_evicted": "last reader left → evicted",
    "idle_before_reuse": "last reader left → read again, of blocks that were still there",
    "evicted_before_needed": "evicted → computed again",
}


class Second(NamedTuple):
    """Blocks of the devices, all servers together, up to a moment."""

    ns: int
    held: int
    stored: int
    stored_again: int
    removed: int


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    """What a pool of another size would have hit, for the same lookups in the same order."""

    ratio: float | None  # of this pool; null: a cache that never evicts
    blocks: int | None
    hit_rate: float | None  # of the looked-up prompt tokens; null: nobody counted lookups
    low: float | None = None  # 95% interval, by resampling stretches of the run; null: too few lookups
    high: float | None = None
    saved_tokens: int | None = None  # that were computed, and would not have been; below 0 of a smaller pool


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution over blocks, in seconds."""

    blocks: int
    p10_s: float
    p50_s: float
    p90_s: float


class Reuse(msgspec.Struct, frozen=True, kw_only=True):
    """How often blocks were read again by later prompts."""

    blocks: int  # different ones that prompts and outputs made
    read_again_share: float  # of these, read at least once
    hottest_tenth_share: float  # of all reads, those of the tenth of the blocks that was read most


Kind = Literal["class", "request", "session", "chain", "others"]


class Taker(msgspec.Struct, frozen=True, kw_only=True):
    """Who needed the room of blocks that were evicted."""

    name: str
    kind: Kind  # chain: a sequence, by its first block
    evicted_blocks: int | None  # for it; null: not recorded
    missed_tokens: int  # of these, needed again later
    victims: list[str]  # who needed them, most first, three at most


class CachePool(msgspec.Struct, frozen=True, kw_only=True):
    """One medium of one server, as its events tell."""

    server: str
    medium: str  # GPU: the device; CPU; STORAGE
    block_size: int
    seconds: float  # that the events cover
    held: int  # blocks now
    peak: int  # blocks, the most at once
    stored: int  # blocks
    stored_again: int  # of these, blocks that had been evicted: a cache without eviction would not have stored them
    removed: int
    removed_unknown: int  # of these, stored before the record began
    cleared: int  # times that it gave up all blocks: a restart, or a reset
    lost_messages: int
    forgotten: int  # evicted blocks that are no longer remembered


class Enough(msgspec.Struct, frozen=True, kw_only=True):
    """The smallest pool that hits a share of what a cache without eviction hits."""

    share: float
    blocks: int
    ratio: float | None  # of this pool


class Worth(msgspec.Struct, frozen=True, kw_only=True):
    """What more memory is worth in goodput, by replays of the run."""

    ratio: float
    more_blocks: int | None
    more_bytes: int | None  # of KV; null: the run does not say what a token takes
    before: Prediction  # the run replayed as it was
    after: Prediction
    sentence: str


class KvLens(msgspec.Struct, frozen=True, kw_only=True):
    """What a KV cache holds, evicts and would gain from more memory."""

    schema: str = "sojourn.kv_lens/1"
    name: str  # of the run, or the addresses
    source: Source  # what it rests on
    headline: str
    seconds: float  # that it covers
    block_size: int | None  # tokens
    pool_blocks: int | None
    pool_is_peak: bool  # the server does not say its size: the most blocks that were held at once, a lower bound
    lookups: int | None  # requests
    queried_tokens: int | None
    hit_rate: float | None  # measured, of the looked-up prompt tokens
    infinite_hit_rate: float | None
    curve: list[CurvePoint]  # smallest pool first, the infinite one last
    curve_error: float | None  # the curve at this pool's own size less what was measured
    enough: list[Enough]
    outcomes: dict[str, float]  # share of the prompt tokens by what became of them: hit, and causes of misses
    times: dict[str, Times]  # by age_when_evicted, idle_when_evicted, idle_before_reuse, evicted_before_needed
    reuse: Reuse | None
    takers: list[Taker]  # most missed tokens first
    pools: list[CachePool]  # [] where nobody recorded events
    worth: Worth | None
    unknown: list[str]  # what this source cannot tell
    warnings: list[str]
