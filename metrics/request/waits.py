"""When each request waited, and for what: spans on the clock and ranges of steps, rebuilt from the records.

The engine books waiting as sums. Here the same waits are found again from the outside, by when steps were planned and
computed and who took part in them, so that each can be laid at somebody's door (`blame`). Both must agree; what
is found here is never scaled to fit.

A request waits
- under way: it came, or got its place, while a step was computed already;
- in line: from the first decision after it came until it is admitted, for the reason of the head of the line;
- aside: it is a long prompt behind others, or a further choice whose first one computes the prompt of both;
- for a slot: all slots have adapters of running requests, and its own adapter is none of them;
- preempted: from the plan that took its blocks until the one that admits it again;
and while it runs it is delayed by others' prompt work in its steps, and by whole steps that it has no part in.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import pandas as pd

from sojourn.metrics.request.timeline import NOBODY, Timeline

# A message may be on its way while the loop turns; after so many turns it has surely been read.
MOST_TURNS = 8
TICK_NS = 1_000  # two readings of one moment
DEFERRALS = ("grammar", "leader", "policy", "adapter")  # in the order in which a request meets them


class Family(IntEnum):
    """What a span of waiting is due to."""

    LINE = 0
    ASIDE = 1
    UNDER_WAY = 2
    PREEMPTED = 3
    SLOT = 4


BOOKED_TO = {
    Family.PREEMPTED: ("memory.preempted", "preempted"),
    Family.UNDER_WAY: ("request.queue", "step"),
    Family.ASIDE: ("request.queue", "policy"),
    Family.SLOT: ("request.queue", "adapter"),
}
# A wait on the clock. `taker` is the sequence that alone is the reason, or NOBODY.
SPAN = np.dtype([("victim", "i8"), ("begin_ns", "i8"), ("end_ns", "i8"), ("family", "i8"), ("taker", "i8")])


class StepRanges(NamedTuple):
    """Ranges of consecutive steps, `first` to before `last`."""

    victim: np.ndarray
    first: np.ndarray
    last: np.ndarray

    def of(self, victim: int) -> Iterable[tuple[int, int]]:
        mine = self.victim == victim
        return zip(self.first[mine].tolist(), self.last[mine].tolist(), strict=True)


@dataclass(frozen=True, slots=True)
class Waits:
    """Of R requests, those of a `requests` table in its order. A victim is a position in it; steps are positions in a
    Timeline. Of a call with several choices it is the one that ended last: its books are those of the critical path.
    """

    request_ids: np.ndarray  # [R]
    sequence: np.ndarray  # [R] whose steps are the victim's, NOBODY for one that never ran
    spans: np.recarray  # of SPAN
    runs: StepRanges  # steps that it took part in, and was booked for
    entry: np.ndarray  # those entries of the timeline
    entry_victim: np.ndarray
    absences: StepRanges  # steps in which it had its place and no share


def waits(line: Timeline, requests: pd.DataFrame) -> Waits:
    """The waits of every request of a `requests` table (a server's own, or joined with a client's)."""
    victim_of = pd.Index(requests.request_id).get_indexer(line.calls)[line.owner]
    last_step = requests.last_step.to_numpy(dtype="float64", na_value=np.nan)
    sequence = _critical(line, victim_of, last_step)
    # In the order of victims, then of steps; what was computed after an end is nobody's
    victim = victim_of[line.who]
    mine = np.flatnonzero((victim >= 0) & (sequence[victim] == line.who) & (line.step[line.at] <= last_step[victim]))
    mine = mine[np.lexsort((line.at[mine], victim[mine]))]
    victim, at = victim[mine], line.at[mine]
    next_preempted = next_preemption(line, line.who[mine], at)
    first_at = np.full(len(requests), NOBODY)
    starts = np.flatnonzero(np.diff(victim, prepend=NOBODY))
    first_at[victim[starts]] = at[starts]
    planned = np.append(line.planned_ns, np.iinfo("int64").max)
    discarded = planned[next_preempted] < line.committed_ns[at]  # it was computed, and booked to nobody
    booked = ~discarded
    between, absences = _gaps(line, requests, victim_of, victim, at, next_preempted)
    spans = np.concatenate([*_first_waits(line, requests, sequence, first_at), *between]).view(np.recarray)
    return Waits(
        request_ids=requests.request_id.to_numpy(dtype=object),
        sequence=sequence,
        spans=spans[spans.end_ns > spans.begin_ns],
        runs=_runs(victim[booked], at[booked]),
        entry=mine[booked],
        entry_victim=victim[booked],
        absences=absences,
    )


def _spans(victim: np.ndarray, begin_ns, end_ns, family: Family, taker=NOBODY) -> np.ndarray:
    found = np.empty(len(victim), dtype=SPAN)
    found["victim"], found["begin_ns"], found["end_ns"] = victim, begin_ns, end_ns
    found["family"], found["taker"] = family, taker
    return found


def _critical(line: Timeline, victim_of: np.ndarray, last_step: np.ndarray) -> np.ndarray:
    """The sequence of each request that was in its last step, the first of them if there are several."""
    last = np.full(len(line.sequences), NOBODY)
    owner = victim_of[line.who]
    counted = (owner >= 0) & (line.step[line.at] <= np.nan_to_num(last_step[owner], nan=-1.0))
    np.maximum.at(last, line.who[counted], line.at[counted])
    ran = np.flatnonzero(last >= 0)
    ended = ran[line.step[last[ran]] == last_step[victim_of[ran]]][::-1]
    sequence = np.full(len(last_step), NOBODY)
    sequence[victim_of[ended]] = ended  # of several the lowest is written last
    return sequence


def next_preemption(line: Timeline, who: np.ndarray, at: np.ndarray) -> np.ndarray:
    """The first plan after each of these entries that takes the sequence's blocks; N where none does."""
    size = len(line)
    keys = np.append(np.sort(line.preempted * (size + 1) + line.preempted_at), np.iinfo("int64").max)
    found = keys[np.searchsorted(keys, who * (size + 1) + at, side="right")]
    return np.where(found // (size + 1) == who, found % (size + 1), size)


def _runs(victim: np.ndarray, at: np.ndarray) -> StepRanges:
    begins = np.flatnonzero((np.diff(victim, prepend=NOBODY) != 0) | (np.diff(at, prepend=NOBODY) != 1))
    ends = np.flatnonzero((np.diff(victim, append=NOBODY) != 0) | (np.diff(at, append=NOBODY) != 1))
    return StepRanges(victim[begins], at[begins], at[ends] + 1)


def _stamps(requests: pd.DataFrame, name: str) -> np.ndarray:
    """0 where a run was recorded before there was such a column."""
    if name not in requests:
        return np.zeros(len(requests), dtype="int64")
    return requests[name].astype("float64").fillna(0).to_numpy().astype("int64")


def encoded_at(requests: pd.DataFrame) -> np.ndarray:
    """When the core was handed each request's prompt; 0 without a request record."""
    booked = _stamps(requests, "arrived_ns") + _stamps(requests, "ledger_token_encode_ns")
    known = _stamps(requests, "encoded_ns") if "encoded_ns" in requests else np.zeros(len(requests), "int64")
    return np.where(known > 0, known, booked)


def _first_waits(
    line: Timeline, requests: pd.DataFrame, sequence: np.ndarray, first_at: np.ndarray
) -> list[np.ndarray]:
    """The spans from when the loop could have seen a request until its first step."""
    arrived, admission = _stamps(requests, "arrived_ns"), _stamps(requests, "ledger_request_admission_ns")
    encoded = encoded_at(requests)
    ready, turn = _seen(line, encoded, admission, first_at)
    until = np.where(first_at >= 0, line.planned_ns[first_at], _stamps(requests, "finished_ns"))
    everyone, known = np.arange(len(requests)), arrived > 0
    recorded = [reasons(cell) for cell in requests.waits]
    deferrals = (np.array([cell.get(name, 0) for cell in recorded]) for name in DEFERRALS)
    grammar_ns, leader_ns, aside_ns, slot_ns = deferrals
    # A step was computed when it came; then it was taken in
    turn_end = np.where(turn >= 0, line.end_ns[turn], 0)
    admitted = np.maximum(ready, turn_end) + np.maximum(admission - (ready - encoded), 0)
    read = np.minimum(admitted + _stamps(requests, "ledger_memory_adapter_load_ns"), until)
    released = np.minimum(read + grammar_ns, until)
    # The first decision that could have admitted it, and the one that did
    decided = _decided(line, turn, released, released > admitted)
    begin = np.minimum(decided, until)
    line_begin = np.minimum(begin + leader_ns, until)
    slot_begin = np.maximum(until - slot_ns, line_begin)
    aside_begin = np.maximum(slot_begin - aside_ns, line_begin)
    # It had its place while the step before its first one was computed
    pending = np.where(first_at > 0, line.device_end_ns[first_at - 1], 0)
    found = (
        _spans(everyone, ready, np.minimum(turn_end, until), Family.UNDER_WAY),
        _spans(everyone, np.minimum(read, released), released, Family.ASIDE, sequence),
        _spans(everyone, begin, line_begin, Family.ASIDE, _leaders(line, sequence)),
        _spans(everyone, line_begin, aside_begin, Family.LINE),
        _spans(everyone, aside_begin, slot_begin, Family.ASIDE),
        _spans(everyone, slot_begin, until, Family.SLOT),
        _spans(everyone, until, pending, Family.UNDER_WAY),
    )
    return [part[known] for part in found]


def _decided(line: Timeline, turn: np.ndarray, ready_ns: np.ndarray, was_deferred: np.ndarray) -> np.ndarray:
    """The first decision about requests that were ready then: one that made a step, or one that found nothing to
    compute in the turn that took them in."""
    never = np.iinfo("int64").max
    planned = np.append(line.planned_ns, never)[np.searchsorted(line.planned_ns, ready_ns, side="left")]
    after = np.minimum(turn + 1, len(line) - 1)
    fruitless = line.end_ns[turn] + line.receive_ns[after] + line.schedule_ns[after]
    at_once = (turn >= 0) & (turn + 1 < len(line)) & (line.schedule_ns[after] > 0) & ~was_deferred
    return np.where(at_once, np.minimum(planned, np.maximum(fruitless, ready_ns)), planned)


def _seen(
    line: Timeline, encoded: np.ndarray, admission: np.ndarray, first_at: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """When each request could have been seen at the latest but for a step under way, and in which turn that was.

    `request.admission` is the way to the loop and the time in which it read the message: it read it in the turn after
    the one that is told, NOBODY where it slept. That was before its first step at the latest.
    """
    ready, turn = encoded, np.full(len(encoded), NOBODY)
    reading = np.append(line.receive_ns, 0)
    latest = np.where(first_at >= 0, first_at, len(line)) - 1
    for _ in range(MOST_TURNS):
        candidate = np.minimum(np.searchsorted(line.begin_ns, ready + TICK_NS, side="right") - 1, latest)
        if (candidate == turn).all():
            break
        turn = candidate
        ready = np.maximum(ready, encoded + np.maximum(admission - reading[turn + 1], 0))
    awake = (turn >= 0) & (ready < line.end_ns[turn])
    return ready, np.where(awake, turn, NOBODY)


def account_of(family: Family, reason: str) -> tuple[str, str]:
    """The account that a span is booked to, and its reason in the words of the records."""
    if family is Family.LINE:
        return "memory.blocked" if reason == "kv_blocks" else "request.queue", reason
    return BOOKED_TO[family]


def reasons(cell: object) -> dict[str, int]:
    """A cell of a column of maps, such as `waits` or `refusals`, as a dict without noughts: readers give a dict, a list
    of pairs, or nothing."""
    if cell is None or isinstance(cell, float):
        return {}
    return {str(name): int(number) for name, number in dict(cell).items() if number}


def _leaders(line: Timeline, sequence: np.ndarray) -> np.ndarray:
    """The first choice of each request's call."""
    first = np.full(len(line.calls), NOBODY)
    first[line.owner[::-1]] = np.arange(len(line.owner))[::-1]
    return np.where(sequence >= 0, first[line.owner[sequence]], NOBODY)


def _gaps(
    line: Timeline, requests: pd.DataFrame, victim_of: np.ndarray, victim: np.ndarray, at: np.ndarray,
    next_preempted: np.ndarray,
) -> tuple[list[np.ndarray], StepRanges]:  # fmt: skip
    """Between two steps of a request: preempted, or running without a share. Its spans, and its absences."""
    size = len(line)
    ends = np.diff(victim, append=NOBODY) != 0  # its last step: it may still have been preempted after that
    back = np.where(ends, size, np.append(at[1:], size))
    preempted_at = np.where(next_preempted <= back, next_preempted, size)
    lost = preempted_at < size
    planned = np.append(line.planned_ns, 0)
    # A plan may be made before the step that came before it is over: then it is no absence from that step
    early = lost & (planned[preempted_at] < np.append(line.committed_ns, 0)[np.maximum(preempted_at - 1, 0)])
    away = (np.minimum(preempted_at, back) > at + 1) & ~(ends & ~lost)
    until = np.minimum(preempted_at, back) - early
    absences = StepRanges(victim[away], at[away] + 1, np.maximum(until[away], at[away] + 1))
    begin = planned[preempted_at[lost]]
    # Who gave way while its last token was under way ended with that step
    over = requests.finish_reason.isin(("stop", "length")).to_numpy()[victim[lost]]
    end = np.where(over, line.committed_ns[at[lost]], _stamps(requests, "finished_ns")[victim[lost]])
    end = np.where(back[lost] < size, planned[np.minimum(back[lost], size)], end)
    taker = _takers(line, victim_of, victim[lost], preempted_at[lost])
    taker_until = np.where(taker >= 0, np.clip(_leaves(line)[taker], begin, end), begin)
    back_at = np.minimum(back[lost], size - 1)
    pending = np.where(back[lost] < size, line.device_end_ns[np.maximum(back_at - 1, 0)], 0)
    found = [
        _spans(victim[lost], begin, taker_until, Family.PREEMPTED, taker),
        _spans(victim[lost], taker_until, end, Family.PREEMPTED),
        _spans(victim[lost], end, pending, Family.UNDER_WAY),
    ]
    return found, absences


def _takers(line: Timeline, victim_of: np.ndarray, victim: np.ndarray, preempted_at: np.ndarray) -> np.ndarray:
    """Whose need took the blocks of each of these victims in these plans."""
    plans = pd.MultiIndex.from_arrays([victim_of[line.preempted], line.preempted_at])
    takers = pd.Series(line.preempted_for, index=plans)
    takers = takers[~takers.index.duplicated()]
    taker = takers.reindex(pd.MultiIndex.from_arrays([victim, preempted_at])).fillna(NOBODY).to_numpy().astype("int64")
    itself = np.append(victim_of, NOBODY)[taker] == victim  # it could not grow: whoever held blocks
    return np.where(itself, NOBODY, taker)


def _leaves(line: Timeline) -> np.ndarray:
    """When each sequence was computed for the last time; the last place is for NOBODY."""
    last = np.zeros(len(line.sequences) + 1, dtype="int64")
    np.maximum.at(last, line.who, line.committed_ns[line.at])
    return last
