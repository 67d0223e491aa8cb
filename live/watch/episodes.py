"""Late requests by the second, and since when an episode of them is over: a window does not reach back into it.

An episode is over after as long without a late request as would have had five of them. So one of sparse events, such
as a long prompt every 15 s, is not over between two of them, and an overload is after ten seconds.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from sojourn.diagnosis.expectation import NOTICEABLE_MS, STRETCH
from sojourn.interop.sources.source import Source
from sojourn.interop.sources.translate import Growth
from sojourn.live.watch.expectation import FEWEST, HISTOGRAMS, QUEUE_SECONDS, shares_below
from sojourn.live.watch.moments import Moment

OVER_S = 10.0  # at least, without a late request
LASTED_S = 15.0  # that an episode did: of a shorter one nobody knows whether it comes again
EXPECTED = 5  # late moments that the same time of the episode had
SCRAPES = 3  # at least, without one


def names_judged(source: Source, objectives: Mapping[str, float]) -> set[str]:
    """The series that tell how many requests were late."""
    families = [HISTOGRAMS[name] for name in objectives] or [QUEUE_SECONDS, HISTOGRAMS["ttft_ms"]]
    suffixes = ("_sum", "_count", *(("_bucket",) if objectives else ()))
    terms = {
        term.name for item in source.translations if item.ours in families for sum_ in item.theirs for term in sum_
    }
    return {f"{name}{suffix}" for name in terms for suffix in suffixes}


def late_requests(grown: Growth, objectives: Mapping[str, float]) -> float:
    """Requests that were late for certain; without objectives all of a moment whose mean wait is lost time."""
    if objectives:
        missed = 0.0
        for name, bound_ms in objectives.items():
            below = grown.below(HISTOGRAMS[name])
            missed += (1 - shares_below(below, bound_ms / 1e3)[1]) * max(below.values()) if below else 0.0
        return missed
    queue, ttft = grown.distribution_of(QUEUE_SECONDS), grown.distribution_of(HISTOGRAMS["ttft_ms"])
    if queue is None or 1e3 * queue.mean < NOTICEABLE_MS["ttft_ms"]:
        return 0.0
    own_s = ttft.mean - queue.mean if ttft is not None else 0.0
    return queue.count if queue.mean >= (STRETCH - 1) * own_s else 0.0


def over_since(moments: Sequence[Moment], interval_s: float, stalls: Iterable[tuple[int, int]] = ()) -> int | None:
    """The last late moment of the last episode that is over; None without one. `stalls`: begin and end of times in
    which an engine stood still: their end is known, and their backlog is taken to need as long as they took."""
    late = [each.ns for each in moments if each.late or (each.waiting or 0.0) >= FEWEST]
    quiet_s, stood = max(OVER_S, SCRAPES * interval_s), list(stalls)
    now_ns = moments[-1].ns if moments else 0
    backlogs = [2 * end_ns - begin_ns for begin_ns, end_ns in stood]
    found = max((each for each in backlogs if _is_quiet(late, each, now_ns, quiet_s)), default=None)
    if not late:
        return found
    episodes = list(_episodes(late, quiet_s))
    for (begin_ns, end_ns, number), (next_ns, *_) in pairwise([*episodes, (now_ns, 0, 0)]):
        lasted_s = (end_ns - begin_ns) / 1e9
        by_stall = any(begin <= end_ns and end >= begin_ns - OVER_S * 1e9 for begin, end in stood)
        if lasted_s < LASTED_S and not by_stall:
            continue
        wanted_s = quiet_s if by_stall else max(quiet_s, EXPECTED * lasted_s / number)
        if (next_ns - end_ns) / 1e9 >= wanted_s:
            found = max(end_ns, found or 0)
    return found


def _is_quiet(late: Sequence[int], since_ns: int, now_ns: int, least_s: float) -> bool:
    return now_ns - since_ns >= least_s * 1e9 and not any(ns >= since_ns for ns in late)


def _episodes(late: Sequence[int], quiet_s: float) -> Iterator[tuple[int, int, int]]:
    """First and last moment of each, and the number of its late moments."""
    begin_ns, number = late[0], 1
    for before, now in pairwise(late):
        if (now - before) / 1e9 >= quiet_s:
            yield begin_ns, before, number
            begin_ns, number = now, 0
        number += 1
    yield begin_ns, late[-1], number
