"""One second of a watched server, and what many of them say of twice the batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from sojourn.interop.sources.courses import HitChange, hit_change, with_pressure
from sojourn.interop.sources.gain import FEWEST_MOMENTS, HALF_BATCH, SMALLEST_BATCH, WHOLE_BATCH
from sojourn.interop.sources.pressure import GAPS, GENERATED
from sojourn.interop.sources.translate import Growth, key, of_family
from sojourn.interop.sources.view import FINISHED

TOKENS_STEP_BY_STEP = "sojourn_token_scheduled_tokens_total"  # by kind; only ours
PROMPT_TOKENS = "sojourn_token_prompt_tokens_total"
# Times of steps by their tokens: seconds that were seen, the largest steps over the smallest, and how well a line fits.
FEWEST_STEPS, SPREAD, CORRELATED = 8, 1.5, 0.7
STEP_SECONDS = "sojourn_compute_step_seconds"


@dataclass(frozen=True, slots=True)
class Moment:
    """One scrape in the history. None where the server does not show it."""

    ns: int
    running: float | None
    waiting: float | None
    kv_use: float | None
    output_tokens_per_s: float | None
    prompt_tokens_per_s: float | None
    requests_per_s: float | None
    tokens_per_step: float | None = None
    seconds_per_step: float | None = None
    gap_s: float | None = None  # between two tokens of a request, the mean of those that came since the scrape before
    late: float = 0.0  # requests for certain, of those that came or ended since the scrape before
    decoding: float | None = None  # requests between two of their tokens, on average over the same time
    hits: float | None = None  # prompt tokens that the prefix cache had, of those looked up since the scrape before
    misses: float | None = None
    preemptions: float = 0.0


def seen_gain(history: Sequence[Moment]) -> float | None:
    """The ratio of output tokens/s, largest batch over about half of it; None where the batch did not vary."""
    seen = [(moment.running, moment.output_tokens_per_s) for moment in history
            if moment.running and moment.output_tokens_per_s]  # fmt: skip
    largest = max((running for running, _ in seen), default=0.0)
    half = [rate for running, rate in seen if HALF_BATCH[0] * largest <= running <= HALF_BATCH[1] * largest]
    whole = [rate for running, rate in seen if running >= WHOLE_BATCH * largest]
    if largest < SMALLEST_BATCH or min(len(half), len(whole)) < FEWEST_MOMENTS:
        return None
    return float(np.median(whole) / np.median(half))


def modelled_gain(history: Sequence[Moment]) -> float | None:
    """What twice the tokens a step would give, as a ratio of tokens/s: 2 where a step takes the same, 1 where it takes
    twice as long. From a line through the mean times of steps of each second, time = a + b · tokens, a and b not
    negative. None where steps of different sizes were not seen, or the line explains little.
    """
    seen = [(moment.tokens_per_step, moment.seconds_per_step) for moment in history
            if moment.tokens_per_step and moment.seconds_per_step and moment.running]  # fmt: skip
    if len(seen) < FEWEST_STEPS:
        return None
    tokens, seconds = np.array(seen).T
    if np.quantile(tokens, 0.9) < SPREAD * np.quantile(tokens, 0.1):
        return None
    slope, base = np.polyfit(tokens, seconds, 1)
    explained = float(np.corrcoef(tokens, seconds)[0, 1])
    if slope <= 0 or explained < CORRELATED:
        return None
    size, base = float(np.quantile(tokens, 0.9)), max(0.0, float(base))
    return 2 * (base + slope * size) / (base + 2 * slope * size)


def hit_change_of(history: Sequence[Moment]) -> HitChange | None:
    """A fall of the hit rate of the prefix cache, within all that is remembered."""
    seen = [moment for moment in history if moment.hits is not None and moment.misses is not None]
    if not seen:
        return None
    moments = pd.Index([moment.ns for moment in seen])
    hits, misses, lost = (
        pd.Series([getattr(moment, name) for moment in seen], moments) for name in ("hits", "misses", "preemptions")
    )
    used = [(moment.ns, moment.kv_use) for moment in seen if moment.kv_use is not None]
    kv_use = pd.Series(dict(used), dtype="float64") if used else None
    return with_pressure(hit_change(hits, misses), kv_use, [lost])


def rates_of(totals: Mapping[str, float], seconds: float) -> dict[str, float | None]:
    """Per second, as of the steps where the server counts them live, else as of the ended requests."""
    by_step = {kind: totals.get(key(TOKENS_STEP_BY_STEP, (("kind", kind),)))
               for kind in ("prefill", "recompute", "decode", "verify")}  # fmt: skip
    live = {
        "prompt": _sum(by_step["prefill"], by_step["recompute"]),
        "output": _sum(by_step["decode"], by_step["verify"]),
    }
    ended = {"prompt": of_family(totals, PROMPT_TOKENS), "output": of_family(totals, GENERATED)}
    counted = {name: ended[name] if each is None else each for name, each in live.items()}
    counted["requests"] = of_family(totals, FINISHED)
    return {name: each / seconds if each is not None and seconds > 0 else None for name, each in counted.items()}


def steps_of(grown: Growth) -> dict[str, float | None]:
    """Tokens and seconds of the mean step between two scrapes; {} of a server that does not show them."""
    steps, tokens = grown.distribution_of(STEP_SECONDS), of_family(grown.totals(), TOKENS_STEP_BY_STEP)
    if steps is None or not tokens:
        return {}
    return {"tokens_per_step": tokens / steps.count, "seconds_per_step": steps.mean}


def gaps_of(grown: Growth, seconds: float) -> dict[str, float | None]:
    """The mean gap between tokens, and how many requests were in one: by Little's law the gaps of a second."""
    gaps = grown.distribution_of(GAPS)
    return {} if gaps is None else {"gap_s": gaps.mean, "decoding": gaps.count * gaps.mean / seconds}


def _sum(*parts: float | None) -> float | None:
    known = [part for part in parts if part is not None]
    return sum(known) if known else None
