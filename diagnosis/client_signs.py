"""What the client's own records hint at: how latencies go with prompts, the crowd and time, and how text came.

Correlations are of ranks (Spearman), so that one slow request decides nothing.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from sojourn.diagnosis.evidence import Client

FEWEST = 20  # requests; a correlation of fewer is chance
STALL = 4.0  # times the median gap of the run: an ordinary step does not vary so much


@dataclass(frozen=True, slots=True)
class Signs:
    """Of the served requests. Correlations lie between -1 and 1; None where too few requests tell."""

    growth: float | None  # of the time to first token: last fifth minus first fifth, over the mean
    with_prompt: float | None  # correlation of the time to first token with the prompt's length
    with_crowd: float | None  # correlation of it with the number of requests under way when it was due
    floor_ms: float | None  # the twentieth part of the times to first token: what every request pays
    gap_ms: float | None  # median gap between two reads of a stream
    stalled: float  # share of the time between tokens that lies in gaps of STALL medians and more
    clumped: float  # share of the tokens after a stall that came in one read with others


def signs_of(facts: Client) -> Signs:
    rows = facts.rows[facts.rows.status == "ok"].sort_values("due_ns")
    crowd = pd.Series(_under_way(rows), index=rows.index)
    gap_ms, stalled, clumped = _gaps(rows)
    ttft = rows.ttft_ms.astype("float64")
    return Signs(
        growth=_growth(ttft.dropna().to_numpy()),
        with_prompt=_correlation(ttft, rows.prompt_tokens),
        with_crowd=_correlation(ttft, crowd),
        floor_ms=float(ttft.quantile(0.05)) if ttft.notna().any() else None,
        gap_ms=gap_ms,
        stalled=stalled,
        clumped=clumped,
    )


def _growth(ttft: np.ndarray) -> float | None:
    """About 2 for a queue that grows as long as requests arrive, 0 for one that stands."""
    fifth = len(ttft) // 5
    if fifth < 4 or ttft.mean() <= 0:
        return None
    return float((np.median(ttft[-fifth:]) - np.median(ttft[:fifth])) / ttft.mean())


def _under_way(rows: pd.DataFrame) -> np.ndarray:
    """[requests]: how many others were under way when each was due."""
    due, ended = rows.due_ns.to_numpy(dtype="float64"), np.sort(rows.last_byte_ns.to_numpy(dtype="float64"))
    return np.arange(len(due)) - np.searchsorted(ended, due)


def _correlation(one: pd.Series, other: pd.Series) -> float | None:
    both = pd.DataFrame({"a": one.astype("float64"), "b": other.astype("float64")}).dropna().rank()
    if len(both) < FEWEST or both.a.std() == 0 or both.b.std() == 0:
        return None
    return float(np.corrcoef(both.a, both.b)[0, 1])


def _gaps(rows: pd.DataFrame) -> tuple[float | None, float, float]:
    """Median gap between reads in ms, the share of time in stalls, and how much text came in one read after them."""
    gaps = [np.diff(np.asarray(stamps, dtype="float64")) / 1e6 for stamps in rows.chunk_ns if stamps is not None]
    gaps = [each for each in gaps if len(each)]
    whole = np.concatenate([np.zeros(0), *gaps])
    if not (whole > 0).any():
        return None, 0.0, 0.0
    usual = float(np.median(whole[whole > 0]))
    late = [each > STALL * usual for each in gaps]
    after = np.concatenate([np.zeros(0), *(each[1:][was[:-1]] for each, was in zip(gaps, late, strict=True))])
    stalled = float(whole[np.concatenate(late)].sum() / whole.sum())
    return usual, stalled, float((after < usual / STALL).mean()) if len(after) else 0.0
