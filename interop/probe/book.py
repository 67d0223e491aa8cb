"""Books the time of each request of a foreign engine, from the readings of a probe, as our engine books its own.

A request waits until a plan gives it a place; each wait has the reason that the last plan gave for the head of the
line. From then on it follows the device: its own steps, steps in which it has no part, and the host in between. Work
of other requests' prompts in its steps is `request.interference`, by FLOPs.
"""

import bisect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sojourn.interop.probe.loop import Choice
from sojourn.interop.probe.prefixes import Prefixes
from sojourn.interop.probe.records import Call, Handled, Step
from sojourn.metrics.compute.cost_model import ModelShape
from sojourn.metrics.compute.step_shares import StepShares, Work, step_shares
from sojourn.metrics.ledger import OWN_WORK, Account, new_ledger, wait_account
from sojourn.metrics.records import PROMPT_KINDS, RequestRecord, StepRecord


@dataclass(slots=True)
class Booking:
    """One ledger under way. `now_ns`: everything before it is booked."""

    now_ns: int
    ledger: list[int] = field(default_factory=new_ledger)
    waits: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def until(self, ns: int, account: Account, reason: str = "") -> None:
        """Books what lies between now and a moment; nothing, if that is past."""
        if ns > self.now_ns:
            self.ledger[account] += ns - self.now_ns
            if reason and account is not Account.MEMORY_TRANSFER:
                self.waits[reason] += ns - self.now_ns
            self.now_ns = ns


class Books:
    """Owns what all requests of one engine share: its steps, and how their time is divided."""

    def __init__(self, steps: Sequence[Step], records: Sequence[StepRecord], shape: ModelShape | None):
        self.steps, self.records = steps, records
        self._shape = shape
        self._planned = [step.planned_ns for step in steps]
        self._ends = [record.end_ns for record in records]
        self._device_ends = [record.device_end_ns or record.end_ns for record in records]
        self._next_reason = _changes([step.refused for step in steps])
        self._shares: dict[int, StepShares] = {}

    def record(
        self,
        name: str,
        choices: Sequence[Choice],
        call: Call | None,
        handled: dict[str, Handled],
        prefixes: Prefixes | None = None,
        names: Mapping[int, str] | None = None,
    ) -> RequestRecord:
        """The record of a call with these choices, at least one. The one that ended last is on the critical path."""
        last = max(choices, key=lambda each: each.ended_ns or 0)
        first = min(choices, key=lambda each: self._first_token_ns(each) or last.ended_ns or each.queued_ns)
        front = handled.get(last.internal)
        whole = self._booked(last, call, front, to_first=False)
        ttft = self._booked(first, call, handled.get(first.internal), to_first=True)
        given = [self.steps[at].given[place] for at, place in last.entries]
        tokens = {each.handle: sum(self.steps[at].given[place] for at, place in each.entries) for each in choices}
        of_call = _fields_of_call(call)
        return RequestRecord(
            request_id=name,
            arrived_ns=_arrival_ns(last, call, front),
            finished_ns=max(last.ended_ns or 0, of_call.get("written_ns", 0), whole.now_ns),
            prompt_tokens=last.prompt_tokens,
            cached_tokens=last.cached_tokens,
            computed_tokens=max(min(last.computed_until, last.prompt_tokens + sum(given) - 1) - last.cached_tokens, 0),
            recomputed_tokens=last.recomputed_tokens,
            output_tokens=sum(tokens.values()),
            longest_output_tokens=max(tokens.values()),
            preemptions=len(last.taken),
            token_ns=[
                self.steps[at].end_ns for (at, _), count in zip(last.entries, given, strict=True) for _ in range(count)
            ],
            encoded_ns=front.encoded_ns if front is not None else None,
            queued_ns=last.queued_ns,
            ledger=whole.ledger,
            ttft=ttft.ledger,
            waits=dict(whole.waits),
            adapter=last.adapter,
            **_ending(last, call),
            **of_call,
            **self._fields_of_steps(last),
            **({} if prefixes is None else prefixes.fields(last.handle, last.cached_tokens, names or {})),
        )

    def _fields_of_steps(self, choice: Choice) -> dict[str, Any]:
        if not choice.entries:
            return {}
        first, last = choice.entries[0][0], choice.entries[-1][0]
        return {
            "first_step": self.records[first].step, "last_step": self.records[last].step,
            "scheduled_ns": self._planned[first],
        }  # fmt: skip

    def _first_token_ns(self, choice: Choice) -> int | None:
        at = next((at for at, place in choice.entries if self.steps[at].given[place]), None)
        return None if at is None else self.steps[at].end_ns

    def _booked(self, choice: Choice, call: Call | None, front: Handled | None, *, to_first: bool) -> Booking:
        """The accounts of a choice up to the call's last byte, or to its first text."""
        book = Booking(_arrival_ns(choice, call, front))
        if front is not None:
            book.until(front.encoded_ns, Account.TOKEN_ENCODE)
        self._book_admission(book, choice.queued_ns)
        entries = self._entries(choice, to_first)
        if not entries:
            self._book_line(book, choice.ended_ns or book.now_ns)
        else:
            self._book_line(book, self._planned[entries[0][0]])
            self._book_steps(book, choice, entries)
        if choice.ended_ns is not None and not to_first:
            book.until(choice.ended_ns, Account.COMPUTE_HOST)
        if front is not None:
            received, decoded = (
                (front.first_received_ns, front.first_decoded_ns)
                if to_first
                else (front.last_received_ns, front.last_decoded_ns)
            )
            book.until(received, Account.REQUEST_STREAM)
            book.until(decoded, Account.TOKEN_DECODE)
        if call is not None:
            book.until(call.first_written_ns if to_first else call.written_ns, Account.REQUEST_STREAM)
        return book

    def _entries(self, choice: Choice, to_first: bool) -> list[tuple[int, int]]:
        if not to_first:
            return choice.entries
        found = []
        for at, place in choice.entries:
            found.append((at, place))
            if self.steps[at].given[place]:
                break
        return found

    def _book_admission(self, book: Booking, queued_ns: int) -> None:
        """Handed over → seen by the scheduler. While a step was under way the loop could not see it."""
        last = bisect.bisect_right(self._ends, queued_ns) - 1
        if last >= 0:
            book.until(min(max(self.records[last].begin_ns, book.now_ns), queued_ns), Account.REQUEST_ADMISSION)
            book.until(min(self._ends[last], queued_ns), Account.REQUEST_QUEUE, "step")
        book.until(queued_ns, Account.REQUEST_ADMISSION)

    def _book_line(self, book: Booking, placed_ns: int) -> None:
        """In line until a plan gave it a place: by the reason of the head of the line at each plan before."""
        at = bisect.bisect_left(self._planned, book.now_ns)
        if at < len(self.steps):
            book.until(min(self.steps[at].begin_ns, placed_ns), Account.REQUEST_QUEUE, "step")
            book.until(min(self._planned[at], placed_ns), Account.COMPUTE_HOST)
        self._book_refused(book, at, placed_ns)

    def _book_refused(self, book: Booking, at: int, until_ns: int, *, preempted: bool = False) -> None:
        """Without a place: from plan number `at` on by the reason that each gives for the head of the line."""
        otherwise = "kv_blocks" if preempted else "policy"
        while at < len(self.steps) and book.now_ns < until_ns:
            reason, at = self.steps[at].refused or otherwise, self._next_reason[at]
            planned_ns = self._planned[at] if at < len(self.steps) else until_ns
            book.until(min(planned_ns, until_ns), wait_account(reason, preempted), reason)
        book.until(until_ns, wait_account(otherwise, preempted), otherwise)

    def _book_steps(self, book: Booking, choice: Choice, entries: Sequence[tuple[int, int]]) -> None:
        taken = iter([*choice.taken, len(self.steps)])
        lost = next(taken)
        before: int | None = None
        for at, place in entries:
            if before is not None and before < lost <= at:
                book.until(self._planned[lost], Account.COMPUTE_HOST)
                self._book_refused(book, lost, self._planned[at], preempted=True)
                lost = next(taken)
            self._book_gap(book, at, is_first=before is None)
            self._book_share(book, at, place)
            before = at
        if before is not None and before < lost < len(self.steps) and choice.ended_ns is not None:
            book.until(self._planned[lost], Account.COMPUTE_HOST)
            self._book_refused(book, lost, choice.ended_ns, preempted=True)
            return
        book.until(self.steps[entries[-1][0]].end_ns, Account.COMPUTE_HOST)

    def _book_gap(self, book: Booking, at: int, *, is_first: bool) -> None:
        """Between two own steps: others' steps, and the host."""
        begin = self._device_ends[at] - self.records[at].device_ns
        step = bisect.bisect_right(self._device_ends, book.now_ns)
        while step < at and book.now_ns < begin:
            book.until(min(self._device_ends[step] - self.records[step].device_ns, begin), Account.COMPUTE_HOST)
            if is_first:
                book.until(min(self._device_ends[step], begin), Account.REQUEST_QUEUE, "step")
            else:
                book.until(min(self._device_ends[step], begin), Account.REQUEST_INTERFERENCE)
            step += 1
        book.until(begin, Account.COMPUTE_HOST)

    def _book_share(self, book: Booking, at: int, place: int) -> None:
        """One step: others' prompts, and its own work."""
        device_ns = max(self._device_ends[at] - book.now_ns, 0)
        book.until(book.now_ns + self._shares_of(at).interference_ns(device_ns, place), Account.REQUEST_INTERFERENCE)
        book.until(self._device_ends[at], OWN_WORK[self.records[at].kinds[place]])

    def _shares_of(self, at: int) -> StepShares:
        if at not in self._shares:
            step, kinds = self.steps[at], self.records[at].kinds
            parts = zip(kinds, step.new, step.past, step.given, strict=True)
            work = [
                Work(place, kind, new, past, int(given > 0) if kind in PROMPT_KINDS else new)
                for place, (kind, new, past, given) in enumerate(parts)
            ]
            self._shares[at] = step_shares(self._shape, work)
        return self._shares[at]


def _changes(reasons: Sequence[str]) -> list[int]:
    """For each place the next one that holds something else; the length where none does."""
    found = [len(reasons)] * len(reasons)
    for at in range(len(reasons) - 2, -1, -1):
        found[at] = found[at + 1] if reasons[at] == reasons[at + 1] else at + 1
    return found


def _arrival_ns(choice: Choice, call: Call | None, front: Handled | None) -> int:
    if call is not None:
        return call.arrived_ns
    return front.encoded_ns if front is not None else choice.queued_ns


def _fields_of_call(call: Call | None) -> dict[str, Any]:
    if call is None:
        return {}
    return {
        "written_ns": call.written_ns or call.finished_ns, "first_written_ns": call.first_written_ns or None,
        "traceparent": call.traceparent, "session": call.session, "writing_ns": call.writing_ns,
    }  # fmt: skip


def _ending(choice: Choice, call: Call | None) -> dict[str, str | None]:
    """Why the request ended, or the error."""
    if call is not None and call.status >= 400:
        return {"error": f"HTTP {call.status}"}
    if choice.reason == "error":
        return {"error": "the engine ended it"}
    left = call is not None and call.left and choice.reason not in ("stop", "length")
    return {"finish_reason": "abort" if left else choice.reason or None}
