"""Signs of pressure in gauges and histograms: what showed while requests waited, and gaps between tokens that stall."""

import math
from itertools import pairwise

import msgspec
import pandas as pd

from sojourn.interop.sources.translate import Distribution, Growth

OFTEN_FULL = 1 / 3  # of the samples with its largest batch, from which on a pool holds no more
KV_FREE = 0.2  # of the pool: with so much room, KV blocks are not what requests wait for
KV_FULL = 0.95  # in use: a request of more than a few blocks may not fit any more; less where the pool is small
AS_EVER, JUST_ENDED = 0.8, 1  # of the largest batch that was seen, or so many fewer: requests end between samples
LATELY = 0.25  # of the samples
LINE = 0.1  # of the longest line: shorter ones are of those that came within a step
STALLED = 4.0  # times the bound that half of the gaps keep: no batch of decodes varies so much
RUNNING, WAITING, KV_USE = "sojourn_request_running", "sojourn_request_waiting", "sojourn_memory_kv_usage_ratio"
GENERATED = "sojourn_token_generated_tokens_total"
PROMPTS, GAPS = "sojourn_request_prompt_length_tokens", "sojourn_request_itl_seconds"


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """What the gauges showed while requests stood in line, as shares of samples. None where a gauge is lacking."""

    samples: int  # with a line, of at least a tenth of the longest
    share: float  # of all samples
    largest: float  # requests waiting
    with_kv_free: float | None
    with_kv_full: float | None
    kv_full_at: float  # KV use from which a mean prompt finds no room, at most KV_FULL
    at_largest_batch: float | None  # with the most requests running, or hardly fewer
    largest_batch: float | None
    one_more_fits: bool | None = None  # beside the largest batch, as large in the KV cache as its mean request
    growth: float | None = None  # of the number that waits: last fifth less first fifth of the samples, over the mean
    since_first: float | None = None  # with a line, of the samples since the first with one; of a live server
    lately: float | None = None  # of the last quarter of the samples; of a live server


class Stalls(msgspec.Struct, frozen=True, kw_only=True):
    """Gaps between tokens that are many times as long as the usual ones."""

    usual_s: float  # half of the gaps lie within it
    above_s: float  # these lie above it
    share: float  # of the time between tokens, at least: each gap counts with the lower bound of its bucket
    wait_s: float  # for the end of the running step, of who comes at any moment: at most, by the upper bounds


def stalls_of(grown: Growth) -> Stalls | None:
    below, gaps = grown.below(GAPS), grown.distribution_of(GAPS)
    if not below or gaps is None:
        return None
    usual_s = next(bound for bound, count in below.items() if count >= 0.5 * gaps.count)
    edges = [edge for edge in below if STALLED * usual_s <= edge < math.inf]
    late_s = sum(edge * (below[after] - below[edge]) for edge, after in pairwise([*edges, math.inf]))
    if not edges or late_s <= 0:
        return None
    whole_s, ends = gaps.count * gaps.mean, list(below)
    counts = [below[end] - before for before, end in zip([0.0, *below.values()], ends, strict=False)]
    longest = [end if math.isfinite(end) else 2 * ends[-2] for end in ends]
    wait_s = sum(count * gap**2 for count, gap in zip(counts, longest, strict=True)) / (2 * whole_s)
    return Stalls(usual_s=usual_s, above_s=edges[0], share=min(1.0, late_s / whole_s), wait_s=wait_s)


def prompt_share(prompts: Distribution | None, settings: dict[str, str]) -> float:
    """The share of the KV pool that a mean prompt takes; 0 where the server tells no size."""
    blocks, size = (settings.get(name, "") for name in ("num_kv_blocks", "block_size"))
    if prompts is None or not blocks.isdigit() or not size.isdigit() or not int(blocks) * int(size):
        return 0.0
    return prompts.mean / (int(blocks) * int(size))


def waiting_of(gauges: dict[str, pd.Series], prompt_share: float, *, is_now: bool) -> Waiting | None:
    """`is_now`: the samples end at present, so that it means something whether requests wait lately."""
    waiting, running, used = (gauges.get(name) for name in (WAITING, RUNNING, KV_USE))
    if waiting is None or not len(waiting):
        return None
    in_line = (waiting > 0) & (waiting >= LINE * waiting.max())
    queued = waiting[in_line].index
    largest_batch = float(running.max()) if running is not None and len(running) else None
    ever = largest_batch or 0.0
    full_at, free_at = min(KV_FULL, 1 - prompt_share), min(1 - KV_FREE, 1 - 2 * prompt_share)
    return Waiting(
        samples=len(queued),
        share=len(queued) / len(waiting),
        largest=float(waiting.max()),
        with_kv_free=_share(used, queued, lambda use: use <= free_at),
        with_kv_full=_share(used, queued, lambda use: use >= full_at),
        kv_full_at=full_at,
        at_largest_batch=_share(running, queued, lambda batch: batch >= min(AS_EVER * ever, ever - JUST_ENDED)),
        largest_batch=largest_batch,
        one_more_fits=_one_more_fits(running, used),
        growth=_growth(waiting),
        since_first=float(in_line.loc[queued[0] :].mean()) if is_now and len(queued) else None,
        lately=float(in_line.iloc[-max(3, int(LATELY * len(in_line))) :].mean()) if is_now else None,
    )


def _one_more_fits(running: pd.Series | None, used: pd.Series | None) -> bool | None:
    """By the use at its largest batches: a pool that ends there looks like a limit on the batch."""
    if running is None or used is None or not running.max() > 0:
        return None
    beside = used.reindex(running[running == running.max()].index).dropna()
    return float((beside * (1 + 1 / float(running.max())) > 1).mean()) < OFTEN_FULL if len(beside) else None


def _growth(waiting: pd.Series) -> float | None:
    """About 2 for a queue that grows all the time, 0 for one that stands; None of too few samples."""
    fifth = len(waiting) // 5
    if fifth < 2 or waiting.mean() <= 0:
        return None
    return float((waiting.iloc[-fifth:].mean() - waiting.iloc[:fifth].mean()) / waiting.mean())


def _share(series: pd.Series | None, at: pd.Index, condition) -> float | None:
    """Of the samples at these moments, the share of which a condition holds."""
    beside = series.reindex(at).dropna() if series is not None else pd.Series(dtype="float64")
    return float(condition(beside).mean()) if len(beside) else None
