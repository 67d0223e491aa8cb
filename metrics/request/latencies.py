"""Latencies as a client saw them: what each is, its values, and how far its quantiles can be trusted. Pure functions.

Every tool has its own TTFT and ITL. Here each has a name of its own and a definition that is printed beside it. From
the *intended* send a stalled server cannot hide its delay; from the *actual* send the figures compare with other tools.
"""

import math
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
import pandas as pd

from sojourn.metrics.cells import weighted
from sojourn.metrics.statistics.intervals import (
    Interval,
    clustered_mean_interval,
    clustered_quantile_interval,
    mean_interval,
    series_quantile_intervals,
)

# Fewest requests for a claim about a quantile at 99% confidence: the early-stopping rule of MLPerf LoadGen for p90 and
# above; p50 by the same bound (q ** n ≤ 0.0013, the chance that n of them all lie below the quantile).
QUANTILE_MIN_SAMPLES = {"p50": 10, "p90": 64, "p95": 130, "p99": 662, "p99.9": 6_636}
QUANTILES = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}

Origin = Literal["intended send", "actual send", "the token before", "the chunk before"]


class Definition(msgspec.Struct, frozen=True):
    """What a latency is measured from, and how, in the words that stand beside its figures."""

    title: str
    origin: Origin
    meaning: str


DEFINITIONS = {
    "ttft_ms": Definition("TTFT", "intended send", "until the first read that held text"),
    "ttfa_ms": Definition(
        "TTFA", "intended send",
        "until the first read with text of the answer, where the server sends reasoning apart from it",
    ),
    "ttft_sent_ms": Definition("TTFT from send", "actual send", "until the first read that held text"),
    "tpot_ms": Definition(
        "TPOT", "the token before",
        "from the first read with text to the last, for each output token that came after the first read",
    ),
    "itl_ms": Definition(
        "ITL", "the token before",
        "one sample per token; if one read brings k tokens, its gap counts k times with gap/k",
    ),
    "inter_chunk_ms": Definition(
        "inter-chunk", "the chunk before",
        "one sample per chunk, however many tokens it held, 0 within one read: what other tools call ITL",
    ),
    "e2e_ms": Definition("E2E", "intended send", "until the last byte"),
    "e2e_sent_ms": Definition("E2E from send", "actual send", "until the last byte"),
    "normalised_ms": Definition(
        "normalised", "intended send", "until the last byte, divided by the output tokens: per token, with the wait"
    ),
    "normalised_sent_ms": Definition(
        "normalised from send", "actual send", "until the last byte, divided by the output tokens"
    ),
}  # fmt: skip
OF_REQUESTS = tuple(name for name in DEFINITIONS if name not in ("itl_ms", "inter_chunk_ms"))


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A figure and its 95% interval; `value` None where there are too few samples, or it falls among failures."""

    value: float | None
    interval: Interval | None = None


class LatencySummary(msgspec.Struct, frozen=True, kw_only=True):
    """One latency of DEFINITIONS over the requests of a run, in milliseconds."""

    name: str
    samples: int  # served requests, gaps between tokens, or gaps between chunks
    failed: int  # requests that count as slower than all: 0 for gaps, of which a failed request has none
    mean: Estimate  # of what was served: no mean can hold what never ended
    std: float | None
    quantiles: dict[str, Estimate]
    max: float | None


def with_origins(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame of `RunDirectory.requests()` with every latency of OF_REQUESTS, NaN where a request has none."""
    lag_ms = (frame.sent_ns.astype("float64") - frame.due_ns.astype("float64")) / 1e6
    tokens = frame.output_tokens.astype("float64")
    counted = tokens.where(tokens > 0)
    sent_e2e = frame.e2e_ms.astype("float64") - lag_ms
    return frame.assign(
        ttft_sent_ms=frame.ttft_ms.astype("float64") - lag_ms,
        e2e_sent_ms=sent_e2e,
        normalised_ms=frame.e2e_ms.astype("float64") / counted,
        normalised_sent_ms=sent_e2e / counted,
    )


def inter_chunk_ms(chunk_ns: Sequence[int]) -> np.ndarray:
    """One sample a gap between two chunks with text; 0 between those of one read, which have one stamp."""
    return np.diff(np.asarray(chunk_ns, dtype="int64")) / 1e6


def itl_ms(chunk_ns: Sequence[int], chunk_tokens: Sequence[int] | None = None) -> np.ndarray:
    """One sample a token after the first read: the gap before a read of k tokens is k gaps of a k-th of it.

    The samples sum to the last stamp minus the first. Where tokens are unknown, a chunk stands for one. A read
    that told text but no new token (the end of a character) adds its gap to the next token's.
    """
    stamps, tokens = reads(chunk_ns, chunk_tokens)
    has_tokens = tokens[1:] > 0
    if not has_tokens.any():
        return np.empty(0)
    last = np.flatnonzero(has_tokens)[-1] + 1
    has_tokens = np.concatenate(([True], has_tokens))
    has_tokens[last] = False  # the last token's stamp is that of the last read: what follows it belongs to it
    ends = np.concatenate((stamps[has_tokens], stamps[-1:]))
    counts = np.concatenate((tokens[has_tokens][1:], tokens[last : last + 1])).astype(int)
    return np.repeat(np.diff(ends) / counts, counts) / 1e6


def reads(chunk_ns: Sequence[int], chunk_tokens: Sequence[int] | None) -> tuple[np.ndarray, np.ndarray]:
    """Stamp and new tokens of each read with text; a chunk stands for a token where the server reports none."""
    stamps = np.asarray(chunk_ns, dtype="int64")
    reported = chunk_tokens is not None and len(chunk_tokens) == len(stamps)
    tokens = np.asarray(chunk_tokens, dtype="float64") if reported else np.ones(len(stamps))
    distinct, first = np.unique(stamps, return_index=True)
    return distinct, np.add.reduceat(tokens, first) if len(stamps) else tokens


def quantiles(values: pd.Series, failed: int = 0, requests: int | None = None) -> dict[str, float | None]:
    """p50 to p99.9 and max in the unit of `values`; None where there are too few samples for the claim.

    Values that come several a request (`requests` in all) claim no more than as many requests can: those of one stream
    hang together.
    A failed request counts as slower than every served one, so that failures cannot improve a quantile; a quantile
    that falls among them is None. `max` is that of the served requests, and always given.
    """
    served = np.sort(values.dropna().to_numpy(dtype="float64"))
    count = len(served) + failed
    result: dict[str, float | None] = {}
    for name, quantile in QUANTILES.items():
        rank = math.ceil(quantile * count) - 1  # nearest rank: a latency that some request really had
        enough = (count if requests is None else requests) >= QUANTILE_MIN_SAMPLES[name]
        result[name] = float(served[rank]) if enough and rank < len(served) else None
    result["max"] = float(served[-1]) if len(served) else None
    return result


def summaries(frame: pd.DataFrame) -> list[LatencySummary]:
    """Every latency of DEFINITIONS that the requests have, in that order; the frame is in order of `due_ns`."""
    frame = with_origins(frame)
    names = [name for name in DEFINITIONS if name not in OF_REQUESTS or name in frame]
    rows = [_of_requests(name, frame) if name in OF_REQUESTS else _of_gaps(name, frame) for name in names]
    return [row for row in rows if row.samples]


def gaps_ms(name: str, frame: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """All samples of `itl_ms` or `inter_chunk_ms` of the served requests, and of each the number of its request."""
    served = frame[frame.status == "ok"]
    stamps, tokens, rows = weighted(served.chunk_ns, served.chunk_tokens)  # a chunk for a token where none are told
    if name == "inter_chunk_ms":
        inner = rows[1:] == rows[:-1]
        return (np.diff(stamps) / 1e6)[inner], rows[1:][inner]
    return _itl_of_all(stamps, tokens, rows)


def _itl_of_all(stamps: np.ndarray, tokens: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`itl_ms` of the chunks of many requests, which stand in the order of their stamps, and the row of each sample."""
    if not len(stamps):
        return np.empty(0), np.empty(0, dtype=int)
    is_read = np.concatenate(([True], (rows[1:] != rows[:-1]) | (stamps[1:] != stamps[:-1])))
    first_chunks = np.flatnonzero(is_read)
    stamps, tokens, rows = stamps[first_chunks], np.add.reduceat(tokens, first_chunks), rows[first_chunks]
    is_first = np.concatenate(([True], rows[1:] != rows[:-1]))
    final = stamps[np.flatnonzero(np.concatenate((is_first[1:], [True])))]  # the last read of each request
    kept = is_first | (tokens > 0)
    stamps, tokens, rows, is_first = stamps[kept], tokens[kept], rows[kept], is_first[kept]
    # The last token's stamp is that of the last read: what follows it belongs to it.
    is_last = np.concatenate((is_first[1:], [True])) & ~is_first
    place = np.cumsum(is_first) - 1
    ends = np.where(is_last, final[place], stamps)
    counts = tokens[~is_first].astype(int)
    gaps = np.diff(ends)[~is_first[1:]]
    return np.repeat(gaps / counts, counts) / 1e6, np.repeat(rows[~is_first], counts)


def _of_requests(name: str, frame: pd.DataFrame) -> LatencySummary:
    failed = int((frame.status != "ok").sum())
    known = frame[(frame.status != "ok") | frame[name].notna()]
    values = known[name].where(known.status == "ok", math.inf).to_numpy(dtype="float64")
    served = values[np.isfinite(values)]
    claimed = quantiles(pd.Series(served), failed)
    intervals = series_quantile_intervals(values, tuple(QUANTILES.values()))
    return _summary(name, served, failed, mean_interval(served), claimed, intervals)


def _of_gaps(name: str, frame: pd.DataFrame) -> LatencySummary:
    values, owners = gaps_ms(name, frame)
    claimed = quantiles(pd.Series(values), requests=len(np.unique(owners)))
    intervals = [clustered_quantile_interval(values, owners, quantile) for quantile in QUANTILES.values()]
    return _summary(name, values, 0, clustered_mean_interval(values, owners), claimed, intervals)


def _summary(
    name: str, values: np.ndarray, failed: int, mean: Interval | None, claimed: dict[str, float | None],
    intervals: list[Interval | None],
) -> LatencySummary:  # fmt: skip
    return LatencySummary(
        name=name,
        samples=len(values),
        failed=failed,
        mean=Estimate(value=float(values.mean()) if len(values) else None, interval=mean),
        std=float(np.std(values)) if len(values) else None,
        quantiles={
            key: Estimate(value=claimed[key], interval=None if claimed[key] is None else bounds)
            for key, bounds in zip(QUANTILES, intervals, strict=True)
        },
        max=claimed["max"],
    )
