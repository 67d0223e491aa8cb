"""Deadlines of tokens: what a reader notices that no mean per request shows. Pure functions over client records.

*Fluidity* (Etalon, arXiv 2407.07000): the first token has a deadline, each later one another time per token after the
deadline of the token before; being early is slack for later, and a stall misses as many deadlines as pass in it, after
which they begin anew. *Smooth goodput* (arXiv 2410.14257): a reader takes in one token each `tpot_ms` from the first
deadline on; the tokens that he could have read while he had to wait are taken off what the answer was worth. So
holding tokens back to smooth their gaps gains nothing, and neither does giving up on a late request: it is worth 0.

What this cannot know: whether anybody read along.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pandas as pd

from sojourn.metrics.cells import weighted
from sojourn.metrics.request.goodput import rate_window
from sojourn.metrics.request.objectives import EVERY_CLASS, objectives_of
from sojourn.metrics.statistics.intervals import Interval, mean_interval

FLUID_SHARE = 0.9  # of its deadlines: what Etalon asks of a request


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """Deadlines of one class, in the order of the intended sends; a request that was not served has met none."""

    klass: str
    first_token_ms: float
    first_token_ms_per_prompt_token: float
    token_ms: float
    sent: int
    fluidity: float  # mean share of its deadlines that a request met
    fluidity_interval: Interval | None
    fluid: int  # requests that met at least FLUID_SHARE of theirs
    smooth_goodput_tokens_per_s: float
    output_tokens_per_s: float  # of served requests: what smooth goodput would be without any wait


def missed_deadlines(token_ms: np.ndarray, first_ms: float, each_ms: float) -> tuple[int, int]:
    """Deadlines that a stream missed, and all it had. `token_ms`: when each token was read, after the intended send."""
    read_ms = np.asarray(token_ms, dtype="float64")
    late = read_ms > first_ms + each_ms * np.arange(len(read_ms))
    if not late.any():  # as most streams are
        return 0, len(read_ms)
    met = in_time = int(np.argmax(late))
    missed, due_ms = 0, first_ms
    for read in read_ms[met:].tolist():
        late_ms = read - (due_ms + each_ms * in_time)  # `in_time` in a row: a sum of gaps would drift
        if late_ms > 0:
            missed += 1 + int(late_ms // each_ms)
            in_time, due_ms = 0, read + each_ms
        else:
            met, in_time = met + 1, in_time + 1
    return missed, missed + met


def fluidity(token_ms: np.ndarray, first_ms: float, each_ms: float) -> float:
    """Share of its deadlines that a stream met; 0 without a token."""
    missed, total = missed_deadlines(token_ms, first_ms, each_ms)
    return 1 - missed / total if total else 0.0


def smooth_worth(token_ms: np.ndarray, first_ms: float, each_ms: float) -> float:
    """Tokens of a stream, less those that its reader could have read while he had to wait; at least 0."""
    read_ms = np.asarray(token_ms, dtype="float64")
    if not len(read_ms):
        return 0.0
    idle_ms = float(np.max(read_ms - (first_ms + each_ms * np.arange(len(read_ms)))))
    return max(0.0, len(read_ms) - max(0.0, idle_ms) / each_ms)


def class_deadlines(
    frame: pd.DataFrame, objectives: list[dict[str, Any]] | None, kept_share: float = 1.0
) -> list[Deadlines]:
    """Fluidity and smooth goodput, over the window of the whole frame, of each class that has both a ttft and a tpot
    objective; the others have no deadline for every token. Requests of an imported result whose tokens have no time are
    left out. Rates of a sample, of which `kept_share` is below 1, are those of all requests that were made."""
    seconds = rate_window(frame, None, kept_share).sampled_seconds
    if "last_token_ns" in frame:
        frame = frame[frame.last_token_ns.isna()]
    bounds = {klass: objectives_of(klass, objectives) for klass in sorted(frame.klass.unique())}
    return [
        _of_class(klass, frame[frame.klass == klass], each, _per_prompt_token(klass, objectives), seconds)
        for klass, each in bounds.items()
        if "ttft_ms" in each and "tpot_ms" in each
    ]


def _of_class(
    klass: str, rows: pd.DataFrame, bounds: dict[str, float], ms_per_prompt_token: float, seconds: float
) -> Deadlines:
    shares, worth, tokens = _shares_and_worth(rows, bounds, ms_per_prompt_token)
    return Deadlines(
        klass=klass,
        first_token_ms=bounds["ttft_ms"],
        first_token_ms_per_prompt_token=ms_per_prompt_token,
        token_ms=bounds["tpot_ms"],
        sent=len(rows),
        fluidity=float(shares.mean()),
        fluidity_interval=mean_interval(shares, most=1.0),
        fluid=int((shares >= FLUID_SHARE).sum()),
        smooth_goodput_tokens_per_s=worth / seconds if seconds else 0.0,
        output_tokens_per_s=tokens / seconds if seconds else 0.0,
    )


def _shares_and_worth(
    rows: pd.DataFrame, bounds: dict[str, float], ms_per_prompt_token: float
) -> tuple[np.ndarray, float, int]:
    """[rows] `fluidity`, the sum of `smooth_worth`, and all tokens. Most streams miss no deadline: only those that do
    are looked at one by one."""
    served, each_ms = rows[(rows.status == "ok").to_numpy()], bounds["tpot_ms"]
    stamps, counts, place = weighted(served.chunk_ns, served.chunk_tokens)
    order = np.lexsort((stamps, place))  # a client may note chunks of several reads out of their order
    counts = counts[order].astype(int)
    stream = np.repeat(place[order], counts)
    read_ms = np.repeat(stamps[order] - served.due_ns.to_numpy(dtype="float64")[place[order]], counts) / 1e6
    length = np.bincount(stream, minlength=len(served))
    begin = np.cumsum(length) - length
    prompt_tokens = served.prompt_tokens.fillna(0).to_numpy(dtype="float64")
    first_ms = bounds["ttft_ms"] + ms_per_prompt_token * prompt_tokens
    late_ms = read_ms - (first_ms[stream] + each_ms * (np.arange(len(stream)) - begin[stream]))
    has_tokens = length > 0
    idle_ms = np.zeros(len(served))
    idle_ms[has_tokens] = np.maximum.reduceat(late_ms, begin[has_tokens]) if len(late_ms) else 0.0
    of_served = has_tokens.astype("float64")
    for row in np.flatnonzero(idle_ms > 0):
        of_served[row] = fluidity(read_ms[begin[row] : begin[row] + length[row]], first_ms[row], each_ms)
    shares = np.zeros(len(rows))
    shares[(rows.status == "ok").to_numpy()] = of_served
    worth = np.maximum(0.0, length - np.maximum(0.0, idle_ms) / each_ms)
    return shares, float(worth.sum()), int(length.sum())


def _per_prompt_token(klass: str, objectives: Sequence[Mapping[str, Any]] | None) -> float:
    """What the class itself states, else what is stated for all."""
    stated = {entry.get("klass", EVERY_CLASS): entry.get("ttft_ms_per_prompt_token") for entry in objectives or ()}
    own = stated.get(klass)
    return float((stated.get(EVERY_CLASS) if own is None else own) or 0.0)
