"""What a lens says, in sentences."""

import msgspec

from sojourn.live.kv_lens.document import CurvePoint, KvLens, Worth
from sojourn.metrics.memory.plan import shown_bytes
from sojourn.metrics.prediction import Interval, Prediction, attainment_text

NOTHING_LOST = 0.005  # of the prompt tokens: what eviction costs below it is not worth a sentence


def headline_of(lens: KvLens) -> KvLens:
    """The same with its first sentence."""
    return msgspec.structs.replace(lens, headline=_headline(lens))


def point_at(lens: KvLens, ratio: float | None) -> CurvePoint | None:
    return next((point for point in lens.curve if point.ratio == ratio), None)


def _headline(lens: KvLens) -> str:
    twice, infinite = point_at(lens, 2.0), point_at(lens, None)
    if lens.hit_rate is None:
        return _without_lookups(lens)
    hit = f"The cache hit {lens.hit_rate:.1%} of the prompt tokens"
    best = lens.infinite_hit_rate
    if best is None or infinite is None:
        return f"{hit}."
    if best - lens.hit_rate < NOTHING_LOST:
        return f"{hit}; a cache without eviction would hit {best:.1%}, so more memory would not help."
    gain = ""
    if twice is not None and twice.hit_rate is not None:
        bounds = f" ({twice.low:.1%} to {twice.high:.1%})" if twice.low is not None and twice.high is not None else ""
        gain = f" Twice the memory would hit {twice.hit_rate:.1%}{bounds}."
    return f"{hit}; a cache without eviction would hit {best:.1%}.{gain}"


def _without_lookups(lens: KvLens) -> str:
    device = [pool for pool in lens.pools if pool.medium == "GPU"]
    stored, again = (sum(getattr(pool, name) for pool in device) for name in ("stored", "stored_again"))
    if not stored:
        return "No block was stored yet."
    if not again:
        return f"{stored:,} blocks were stored, and none of them had been evicted before."
    twice = point_at(lens, 2.0)
    gain = ""
    if twice is not None and twice.saved_tokens is not None and lens.block_size:
        gain = f" Twice the memory would have kept {twice.saved_tokens // lens.block_size:,} of them."
    return f"{again:,} of {stored:,} stored blocks ({again / stored:.1%}) had been evicted before.{gain}"


def worth_of(
    ratio: float, before: Prediction, after: Prediction, pool_blocks: int | None, bytes_per_block: int | None
) -> Worth:
    """What a pool of `ratio` times the blocks is worth, from two replays of one run."""
    more = None if pool_blocks is None else round((ratio - 1) * pool_blocks)
    size = None if more is None or not bytes_per_block else more * bytes_per_block
    memory = f"{ratio:g} times the KV memory" if ratio != 2 else "Twice the KV memory"
    room = f" ({shown_bytes(size)} more)" if size and size > 0 else ""
    if after.is_refused or not _is_number(after.goodput_rps.median):
        sentence = f"What {memory[0].lower()}{memory[1:]} is worth cannot be replayed: {'; '.join(after.doubts)}"
    else:
        doubt = "" if after.is_trusted and before.is_trusted else " The replays are not trusted; see the doubts."
        sentence = (
            f"{memory}{room}: goodput {_shown(before.goodput_rps, '.3g')} → {_shown(after.goodput_rps, '.3g')} "
            f"requests/s, requests within their objectives {attainment_text(before)} → "
            f"{attainment_text(after)}, by replay.{doubt}"
        )
    return Worth(
        ratio=ratio, more_blocks=more, more_bytes=size, before=before, after=after, sentence=sentence
    )  # fmt: skip


def _shown(interval: Interval, form: str) -> str:
    """The median, and the bounds where they read differently."""
    low, median, high = (format(bound, form) for bound in (interval.low, interval.median, interval.high))
    return median if low == high else f"{median} ({low} to {high})"


def _is_number(value: float | None) -> bool:
    return value is not None and value == value
