"""Stretches in which the load generator stood still: it neither sent what was due nor read what was there.

A slow network delays each byte for itself, and a busy server goes on to be sent to. Only a client that stands still
does nothing at all while requests are due, or while the core gives out tokens.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from sojourn.metrics.run.front_turns import Turns

STALL_NS = 50_000_000  # many times what a socket loop takes for all that is ready
FEWEST_TOKENS = 4  # of the core within a gap: a last token may be under way
MARGIN_NS = 10_000_000  # on its way from the core to the client


@dataclass(frozen=True, slots=True)
class ClientStalls:
    """The stalls of a run, in their order."""

    stalls: Turns
    share: float  # of the time between the first and the last event of the client, 0 to 1
    longest_ms: float

    def __len__(self) -> int:
        return len(self.stalls)

    def waited_share(self, rows: pd.DataFrame, *, first: bool) -> float:
        """Of the time that answers of these requests were in transit, what lay in stalls: of their first text, or of
        their last byte."""
        begin, end = ("first_written_ns", "first_token_ns") if first else ("written_ns", "last_byte_ns")
        written, read = _stamps(rows, begin), _stamps(rows, end)
        transit = np.nansum(np.maximum(read - written, 0.0))
        return (
            float(np.nansum(self.stalls.within(written, np.maximum(read, written))) / transit) if transit > 0 else 0.0
        )


def client_stalls(rows: pd.DataFrame, *, by_tokens: bool) -> ClientStalls:
    """`by_tokens`: a gap with tokens of the core counts, too. Not so where the front may have held them."""
    sent = np.sort(_stamps(rows, "sent_ns"))
    due = np.sort(_stamps(rows, "due_ns"))
    events = np.sort(np.concatenate([sent, _stamps(rows, "last_byte_ns"), _flat(rows, "chunk_ns")]))
    events = events[~np.isnan(events)]
    begin, end = events[:-1], events[1:]
    is_long = end - begin >= STALL_NS
    begin, end = begin[is_long], end[is_long]
    missed = _within(due, begin, end - STALL_NS / 2) > 0  # nothing was sent before the end of the gap
    if by_tokens:
        tokens = np.sort(_flat(rows, "token_ns"))
        missed |= _within(tokens, begin, end - MARGIN_NS) >= FEWEST_TOKENS
    begin, lasted = begin[missed], (end - begin)[missed]
    whole = float(events[-1] - events[0]) if len(events) > 1 else 0.0
    return ClientStalls(
        Turns(begin, lasted), float(lasted.sum()) / whole if whole else 0.0, float(lasted.max(initial=0.0)) / 1e6
    )


def _within(stamps: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """How many stamps, sorted, lie in each stretch."""
    return np.searchsorted(stamps, np.maximum(end, begin)) - np.searchsorted(stamps, begin, side="right")


def _stamps(rows: pd.DataFrame, name: str) -> np.ndarray:
    return rows[name].astype("float64").to_numpy(dtype="float64", na_value=np.nan)


def _flat(rows: pd.DataFrame, name: str) -> np.ndarray:
    cells = [cell for cell in rows[name] if cell is not None and not isinstance(cell, float)] if name in rows else []
    return np.concatenate([np.zeros(0), *(np.asarray(cell, dtype="float64") for cell in cells)])
