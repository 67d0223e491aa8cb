"""Stretches in which no client got any text while some waited for it, and what the server's page did meanwhile.

A client alone sees that nothing comes. The page tells who stood: a front that stands answers no scrape; an engine that
stands makes no token, while its front answers. What the prompts under way explain at the run's own pace is no stop.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from sojourn.diagnosis.client_stalls import client_stalls
from sojourn.metrics.run.front_turns import Turns

Stood = Literal["engine", "front"]
LEAST_NS = 0.4e9  # that nobody hears anything, beyond what the work explains
USUAL, TIMES = 0.9, 4.0  # the quantile of the gaps between two reads of a stream, and times it: no step varies so much
PACE = 0.05  # the quantile of the times to first token per prompt token: what a prompt costs at least
LATE_S, LATE_TIMES = 0.2, 10.0  # a scrape takes that long, and so many times the median: its front did not answer
FEWEST_LOOKS = 2  # within a stop: only between two of them is it known that no token was made
MARGIN_NS = 0.2e9  # between a scrape and the text that goes with it, at most
COVERED = 0.5  # of a stretch, in which the front owed the answer to a scrape
LEAST_COMPUTED = 0.05  # of a prompt's tokens: a hit rate of nearly 1 bounds nothing
SPANS = {  # of an objective's quantity
    "ttft_ms": ("due_ns", "first_token_ns"), "tpot_ms": ("first_token_ns", "last_byte_ns"),
    "e2e_ms": ("due_ns", "last_byte_ns"),
}  # fmt: skip
BACKLOG = 2.0  # times a stop, at most, until its backlog is served: a longer line has another cause


@dataclass(frozen=True, slots=True)
class Stop:
    begin_ns: float
    end_ns: float
    over_ns: float  # no more are under way than when it began
    stood: Stood


@dataclass(frozen=True, slots=True)
class Stops:
    """The stops of a run that the page tells apart, in their order."""

    found: tuple[Stop, ...]
    scrape_s: float = 0.0  # that a scrape takes, the median of all

    def of(self, stood: Stood) -> "Stops":
        return Stops(tuple(each for each in self.found if each.stood == stood), self.scrape_s)

    @property
    def total_s(self) -> float:
        return sum(each.end_ns - each.begin_ns for each in self.found) / 1e9

    @property
    def longest_s(self) -> float:
        return max((each.end_ns - each.begin_ns for each in self.found), default=0.0) / 1e9

    def within(self, begin_ns: pd.Series, end_ns: pd.Series) -> np.ndarray:
        """Nanoseconds of stops and of their backlog in each stretch; NaN where an end of it is not known."""
        begins = np.array([each.begin_ns for each in self.found])
        ends = np.array([each.over_ns for each in self.found])
        ends = np.minimum(ends, np.append(begins[1:], np.inf))
        stretches = (each.astype("float64").to_numpy(dtype="float64", na_value=np.nan) for each in (begin_ns, end_ns))
        return Turns(begins, ends - begins).within(*stretches)

    def spent_ms(self, rows: pd.DataFrame, objective: str) -> np.ndarray:
        """Of each request's latency, or of its time per output token, what lies in stops and their backlog."""
        begin, end = SPANS[objective]
        spent_ms = self.within(rows[begin], rows[end]) / 1e6
        gaps = rows.output_tokens.astype("float64").to_numpy(dtype="float64", na_value=np.nan) - 1
        return spent_ms / np.maximum(gaps, 1.0) if objective == "tpot_ms" else spent_ms

    def share_of(self, rows: pd.DataFrame, objective: str, bound_ms: float) -> float:
        """Of what late requests take above an objective, the part that lies in stops and their backlog, 0 to 1."""
        spent_ms = self.spent_ms(rows, objective)
        above_ms = rows[objective].astype("float64").to_numpy(dtype="float64", na_value=np.nan) - bound_ms
        known = ~np.isnan(spent_ms) & (above_ms > 0)
        return float(np.minimum(spent_ms, above_ms)[known].sum() / above_ms[known].sum()) if known.any() else 0.0


NO_STOPS = Stops(())


def stops_of(rows: pd.DataFrame, looks: pd.DataFrame, hit_rate: float = 0.0) -> Stops:
    """`rows` as `Client.rows`, `looks` as `looks_of` gives them. `hit_rate` is that of the prefix cache: the prompts of
    a stretch may be those without a hit."""
    if not len(looks) or not len(rows):
        return NO_STOPS
    sent, ended, first = (_stamps(rows, name) for name in ("sent_ns", "last_byte_ns", "first_token_ns"))
    ended = np.where(np.isnan(ended), np.inf, ended)
    tokens = rows.prompt_tokens.astype("float64").fillna(0.0).to_numpy()
    pace = _pace(first - sent, tokens) / max(1.0 - hit_rate, LEAST_COMPUTED)
    still = client_stalls(rows, by_tokens=False).stalls
    took = looks.end_ns.to_numpy("float64") - looks.begin_ns.to_numpy("float64")
    scrape_ns = float(np.median(took))
    late_ns = max(1e9 * LATE_S, LATE_TIMES * scrape_ns)
    typical = _typical_crowd(sent, ended)
    found = []
    for begin, end in _silences(rows, sent, ended):
        waits = (sent < end) & ~(first < end)  # a prompt whose first text has not come
        explained = pace * float(tokens[waits].sum())
        in_client = float(still.within(np.array([begin]), np.array([end]))[0]) if len(still) else 0.0
        if end - begin - explained < LEAST_NS or in_client > (end - begin) / 2:
            continue
        seen = _who_stood(looks, begin, end, late_ns)
        if seen is not None:
            stood, until = seen
            found.append(Stop(begin, until, _over(sent, ended, begin, until, typical), stood))
    return Stops(tuple(found), scrape_ns / 1e9)


def _silences(rows: pd.DataFrame, sent: np.ndarray, ended: np.ndarray) -> Sequence[tuple[float, float]]:
    """From the moment at which nobody hears anything and somebody waits, to the next text of anybody."""
    streams = [np.asarray(each, dtype="float64") for each in rows.chunk_ns if isinstance(each, list | np.ndarray)]
    gaps = np.concatenate([np.zeros(0), *(np.diff(each) for each in streams)])
    least = max(LEAST_NS, TIMES * float(np.quantile(gaps, USUAL)) if len(gaps) else 0.0)
    firsts = _stamps(rows, "first_token_ns")
    heard = np.unique(np.concatenate([firsts[~np.isnan(firsts)], *streams]))
    found = []
    long = np.flatnonzero(np.diff(heard) >= least)
    for begin, end in zip(heard[long], heard[long + 1], strict=True):
        under_way = (sent < end) & (ended >= end)
        since = max(begin, float(sent[under_way].min())) if under_way.any() else end
        if end - since >= least:
            found.append((since, float(end)))
    return found


def _who_stood(looks: pd.DataFrame, begin: float, end: float, late_ns: float) -> tuple[Stood, float] | None:
    """Who stood, and until when; None where the page does not tell."""
    asked, answered = looks.begin_ns.to_numpy("float64"), looks.end_ns.to_numpy("float64")
    late = (answered - asked >= late_ns) & (answered > begin) & (answered <= end + MARGIN_NS)
    owed = np.minimum(answered, end)[late] - np.maximum(asked, begin)[late]
    if owed.sum() >= COVERED * (end - begin):
        return "front", min(end, float(answered[late].max()))
    inside = (asked >= begin) & (answered <= end - MARGIN_NS)  # at its end it may have gone on already
    made = looks.generated.to_numpy("float64")[inside][1:]  # since the first look within
    if inside.sum() >= FEWEST_LOOKS and not np.isnan(made).any() and made.sum() == 0:
        return "engine", end
    return None


def _over(sent: np.ndarray, ended: np.ndarray, begin: float, until: float, typical: float) -> float:
    """When no more are under way than when a stop began, or usually; at most BACKLOG of its length later."""
    before = max(typical, float(((sent <= begin) & (ended > begin)).sum()))
    latest = until + BACKLOG * (until - begin)
    moments = np.sort(ended[(ended > until) & (ended < latest)])
    for moment in moments:
        if ((sent <= moment) & (ended > moment)).sum() <= before:
            return float(moment)
    return latest if len(moments) else until


def _typical_crowd(sent: np.ndarray, ended: np.ndarray) -> float:
    return float(np.median([((sent <= each) & (ended > each)).sum() for each in sent])) if len(sent) else 0.0


def _pace(ttft_ns: np.ndarray, tokens: np.ndarray) -> float:
    """Nanoseconds of a prompt token, at least."""
    known = ~np.isnan(ttft_ns) & (tokens > 0)
    return float(np.quantile(ttft_ns[known] / tokens[known], PACE)) if known.any() else 0.0


def _stamps(rows: pd.DataFrame, name: str) -> np.ndarray:
    return rows[name].astype("float64").to_numpy(dtype="float64", na_value=np.nan)


def without(stops: Stops, rows: pd.DataFrame) -> pd.DataFrame:
    """Requests as if nobody had stood: each latency without the time in stops and their backlog."""
    rows = rows.copy()
    for objective in SPANS:
        rows[objective] = rows[objective].astype("float64") - stops.spent_ms(rows, objective)
    return rows
