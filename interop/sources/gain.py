"""What twice the batch gives, from the gaps between tokens that a server counts as they happen."""

from collections.abc import Iterable, Iterator

import numpy as np
import pandas as pd

from sojourn.interop.sources import scrapes
from sojourn.interop.sources.pressure import GAPS
from sojourn.interop.sources.registry import recognise
from sojourn.interop.sources.translate import names_that_grow
from sojourn.metrics.run.directory import RunDirectory

# Samples by the size of the batch, as shares of the largest; how many of them, and which batch is worth a comparison.
HALF_BATCH, WHOLE_BATCH, FEWEST_MOMENTS, SMALLEST_BATCH = (0.3, 0.6), 0.85, 4, 4
FEWEST_SMALL, LEAST_DECODING = 2, 0.3  # moments of a small batch; and of its time, that a moment had a request
FEWEST_STEPS = 5.0  # of a moment: with fewer its batch is not known well


def gap_gain(moments: Iterable[tuple[float | None, float | None]]) -> float | None:
    """What twice the largest batch would give, as a ratio of tokens/s, from the mean gap between tokens (seconds) and
    the mean number of decoding requests of each moment: 2 where gaps stay as they are, 1 where they double with the
    batch. None where the batch did not vary, or the gaps of small and of large batches overlap."""
    seen = [(max(1.0, decoding), gap_s) for gap_s, decoding in _pooled(moments) if decoding >= LEAST_DECODING]
    if not seen:
        return None
    batch, gaps = np.array(seen).T
    largest = float(np.quantile(batch, 0.9))
    few, many = batch <= HALF_BATCH[1] * largest, batch >= WHOLE_BATCH * largest
    if largest < SMALLEST_BATCH or few.sum() < FEWEST_SMALL or many.sum() < FEWEST_MOMENTS:
        return None
    if np.quantile(gaps[many], 0.25) <= np.quantile(gaps[few], 0.75):
        return None
    sizes = np.median(batch[few]), np.median(batch[many])
    slope = (np.median(gaps[many]) - np.median(gaps[few])) / (sizes[1] - sizes[0])
    base = max(0.0, float(np.median(gaps[many]) - slope * sizes[1]))
    return float(2 * (base + slope * sizes[1]) / (base + 2 * slope * sizes[1]))


def _pooled(moments: Iterable[tuple[float | None, float | None]]) -> Iterator[tuple[float, float]]:
    """Neighbours as one where they hold few steps, of about a gap each. Moments are taken as of a second."""
    steps = spent = gaps = 0.0
    held = 0
    for gap_s, decoding in moments:
        if not gap_s or not decoding:
            continue
        held, steps, spent, gaps = held + 1, steps + 1 / gap_s, spent + decoding, gaps + decoding / gap_s
        if steps >= FEWEST_STEPS:
            yield spent / gaps, spent / held
            held, steps, spent, gaps = 0, 0.0, 0.0, 0.0


def gain_of_run(run: RunDirectory) -> float | None:
    """The same of a run's scrapes; None where its server counts no gaps as they happen, or several processes answered
    in turn. Raises RunDataError."""
    source = recognise(scrapes.names(run))
    if source is None or not source.live_gaps or scrapes.alternate(run, names_that_grow(source)):
        return None
    families = {term.name for item in source.translations if item.ours == GAPS for sum_ in item.theirs for term in sum_}
    answered_ns = scrapes.scrape_summary(run).answered_ns
    wanted = [f"{name}{suffix}" for name in families for suffix in ("_sum", "_count")]
    rows = scrapes.growth_over_time(run, wanted, int(answered_ns[0]), int(answered_ns[-1]))
    if rows.empty:
        return None
    spent, counted = (rows[rows.name.str.endswith(suffix)].groupby("ns").growth.sum() for suffix in ("_sum", "_count"))
    lasted_s = pd.Series(np.diff(answered_ns) / 1e9, index=answered_ns[1:])
    moments = pd.DataFrame({"spent": spent, "counted": counted, "lasted": lasted_s}).dropna()
    moments = moments[moments.counted > 0]
    return gap_gain(zip(moments.spent / moments.counted, moments.spent / moments.lasted, strict=True))
