"""Books the time of every request that is alive in the core, from the clock readings of the host and of the device.

Who runs pays by the device's clock: for the time between two steps, when the device waited for the host
(`compute.host`); for a step by what it was made of; and then, once and not for every token, for the lag from the end
of the device's work to the moment when its token left the loop. What the host does while the device computes costs
nothing. Without overlap this is the sum of the stages: the host's are all outside the device's time.

Who runs and got no share of a step pays `request.interference` for it, or `request.queue` if it got its place while
that step was computed already. Who waits pays by the reason for which the head of the line was refused, because that
reason is what everyone behind it waits for. Who is held aside (a fork without its leader's prompt, a long prompt behind
others) pays `request.queue`. Waiting costs nothing per step: two clocks run, and each request reads them when it begins
and when it ends waiting.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.request.plan import ScheduledTokens, StepOutcome, StepPlan
from engine.request.request import Request, State
from metrics.costmodel import ModelShape, decode_flops, request_flops
from metrics.ledger import Account

MEMORY_REASONS = ("kv_blocks",)


@dataclass(frozen=True, slots=True)
class Alive:
    """Who is alive when a step is committed, before it ends somebody."""

    running: list[Request]
    gave_way: list[Request]  # who computed in it, waits by now, and emits the token that was under way
    num_overrun: int  # tokens of the step whose requests have ended since it was planned


def alive(plan: StepPlan, running: Sequence[Request]) -> Alive:
    gave_way, overrun = [], 0
    for item in plan.scheduled:
        state = item.request.state
        if state is State.FINISHED:
            overrun += item.new_tokens
        elif state is State.PREEMPTED:
            gave_way.append(item.request)
    return Alive(list(running), gave_way, overrun)


class Accountant:
    """Owns the wait clocks. The shares of a step's device time are weighed by their FLOPs.

    Everything is booked from the two readings around it. Time between two turns that no stage holds stays unaccounted.
    """

    def __init__(self, shape: ModelShape):
        self._shape = shape
        self._queue_ns = 0  # time that the head of the queue waited for a place or the budget, so far
        self._blocked_ns = 0  # ... and for KV blocks
        self._decided_ns: int | None = None  # the last decision, if it left somebody waiting
        self._held_back_by: str | None = None
        self._committed_ns = 0  # who ran then is booked up to here
        self._pauses: list[tuple[int, int]] = []  # since then: what no stage holds

    def paused(self, begin_ns: int, end_ns: int) -> None:
        """Between two turns of the loop."""
        if begin_ns < end_ns:
            self._pauses.append((begin_ns, end_ns))

    def visible(self, request: Request, encoded_ns: int, received_ns: int, last_step: tuple[int, int] | None) -> None:
        """A request was handed over. While a step ran it could not have been seen: that part is waiting."""
        begin_ns, end_ns = last_step or (encoded_ns, encoded_ns)
        step_began_ns = min(max(begin_ns, encoded_ns), received_ns)
        step_ended_ns = min(max(end_ns, step_began_ns), received_ns)
        request.ledger[Account.REQUEST_QUEUE] += step_ended_ns - step_began_ns
        request.ledger[Account.REQUEST_ADMISSION] += (step_began_ns - encoded_ns) + (received_ns - step_ended_ns)

    def planned(self, plan: StepPlan, arrived: Sequence[tuple[Request, int]], begin_ns: int, now_ns: int) -> None:
        """A decision was taken in the turn that began at `begin_ns`. `arrived` came since the last one, at the times
        that are told. The wait clocks advance, who was admitted reads them, who was refused starts to."""
        self._advance(now_ns)
        mark = (self._queue_ns, self._blocked_ns)
        for request, received_ns in arrived:
            request.ledger[Account.REQUEST_QUEUE] += max(0, begin_ns - received_ns)  # in a turn without a decision
            request.ledger[Account.COMPUTE_HOST] += now_ns - max(begin_ns, received_ns)
            request.wait_mark = mark
        for request in plan.preempted:
            self._end_running(request, now_ns)
            request.wait_mark = mark
        for request, aside in plan.moves:
            if request.state is not State.FINISHED:
                self._end_wait(request)
                request.wait_mark, request.waits_aside = mark, aside
        for request in plan.admitted:
            self._end_wait(request)
            request.booked_ns, request.lag_ns = now_ns, 0
        self._decided_ns = now_ns if plan.num_waiting else None
        self._held_back_by = plan.held_back_by

    def executed(self, items: Sequence[ScheduledTokens], alive: Alive, outcome: StepOutcome, committed_ns: int) -> int:
        """A step is over: books the device's time to those who took part, and their absence to those who did not.

        `items` is the plan's; `alive` says who was, just before it was committed. Returns the step's FLOPs, by whose
        shares the device time is divided.
        """
        begin_ns, end_ns, sampling_ns = outcome.device_begin_ns, outcome.device_end_ns, outcome.sampling_ns
        lag_ns = self._host_ns(end_ns, committed_ns)
        present, total = alive.running, 0
        if all(item.kind == "decode" for item in items):
            total = decode_flops(self._shape, [item.past_tokens for item in items])
            took_part = {item.request.order for item in items}
            members = [request for request in present if request.order in took_part]
            for request in members:
                request.ledger[_DECODE] += end_ns - begin_ns - sampling_ns
                request.ledger[_SAMPLE] += sampling_ns
        else:
            total, members = self._book_shares(items, present, end_ns - begin_ns - sampling_ns, sampling_ns)
        gap_begin_ns, gap_ns = begin_ns, 0
        for request in members:
            if request.booked_ns != gap_begin_ns:  # most were booked up to the same moment
                gap_begin_ns = request.booked_ns
                gap_ns = self._host_ns(gap_begin_ns, begin_ns) if gap_begin_ns < begin_ns else 0
            request.ledger[_HOST] += gap_ns + lag_ns - request.lag_ns
            request.booked_ns, request.lag_ns = end_ns, lag_ns
        if len(members) < len(present):
            self._book_absence(members, present, outcome, committed_ns)
        if alive.gave_way:
            self._advance(committed_ns)
        for request in alive.gave_way:
            self._end_wait(request)
            request.wait_mark = (self._queue_ns, self._blocked_ns)
        self._committed_ns = committed_ns
        self._pauses.clear()
        return total

    def _book_shares(
        self, items: Sequence[ScheduledTokens], present: Sequence[Request], device_ns: int, sampling_ns: int
    ) -> tuple[int, list[Request]]:
        """Of a step with prompts in it. Returns its FLOPs, and who of those who run took part."""
        shape = self._shape
        weights = [request_flops(shape, item.new_tokens, item.past_tokens, item.samples) for item in items]
        total = sum(weights)
        prompts = sum(w for w, item in zip(weights, items, strict=True) if item.kind != "decode")
        shares = {item.request.order: (item.kind, weight) for item, weight in zip(items, weights, strict=True)}
        members = [request for request in present if request.order in shares]
        for request in members:
            kind, weight = shares[request.order]
            interference = device_ns * (prompts if kind == "decode" else prompts - weight) // total
            request.ledger[Account.REQUEST_INTERFERENCE] += interference
            request.ledger[_OWN_WORK[kind]] += device_ns - interference
            request.ledger[_SAMPLE] += sampling_ns
        return total, members

    def _book_absence(
        self, members: Sequence[Request], present: Sequence[Request], outcome: StepOutcome, committed_ns: int
    ) -> None:
        took_part = {request.order for request in members}
        begin_ns, end_ns = outcome.device_begin_ns, outcome.device_end_ns
        for request in present:
            if request.order in took_part:
                continue
            ledger, mark = request.ledger, request.booked_ns
            host_ns = self._host_ns(max(mark, end_ns), committed_ns)
            if mark < begin_ns:
                ledger[Account.REQUEST_INTERFERENCE] += end_ns - begin_ns
                ledger[_HOST] += self._host_ns(mark, begin_ns)
            elif mark < end_ns:
                ledger[Account.REQUEST_QUEUE] += end_ns - mark
            ledger[_HOST] += host_ns - request.lag_ns
            request.booked_ns, request.lag_ns = max(mark, end_ns), host_ns

    def aborted(self, request: Request, waited: bool, now_ns: int) -> None:
        """A request ended between two steps, while it waited or while it ran."""
        if waited:
            self._advance(now_ns)
            self._end_wait(request)
        else:
            self._end_running(request, now_ns)

    def _end_running(self, request: Request, now_ns: int) -> None:
        """Since the last commit, or since it got its place, the host had it."""
        request.ledger[Account.COMPUTE_HOST] += self._host_ns(max(request.booked_ns, self._committed_ns), now_ns)

    def _host_ns(self, begin_ns: int, end_ns: int) -> int:
        """The time between two readings, without pauses."""
        idle_ns = sum(max(0, min(end, end_ns) - max(begin, begin_ns)) for begin, end in self._pauses)
        return end_ns - begin_ns - idle_ns

    def _advance(self, now_ns: int) -> None:
        """Moves the wait clocks to now, at the charge of what held the head of the queue back."""
        if self._decided_ns is not None:
            waited = now_ns - self._decided_ns
            if self._held_back_by in MEMORY_REASONS:
                self._blocked_ns += waited
            else:
                self._queue_ns += waited
            self._decided_ns = now_ns

    def _end_wait(self, request: Request) -> None:
        queue_ns = self._queue_ns - request.wait_mark[0]
        blocked_ns = self._blocked_ns - request.wait_mark[1]
        if request.preemptions:
            request.ledger[Account.MEMORY_PREEMPTED] += queue_ns + blocked_ns
        elif request.waits_aside:
            request.ledger[Account.REQUEST_QUEUE] += queue_ns + blocked_ns
        else:
            request.ledger[Account.REQUEST_QUEUE] += queue_ns
            request.ledger[Account.MEMORY_BLOCKED] += blocked_ns


_DECODE, _SAMPLE, _HOST = int(Account.COMPUTE_DECODE), int(Account.TOKEN_SAMPLE), int(Account.COMPUTE_HOST)
_OWN_WORK = {
    "prefill": Account.COMPUTE_PREFILL,
    "recompute": Account.MEMORY_RECOMPUTE,
    "decode": Account.COMPUTE_DECODE,
    "verify": Account.COMPUTE_DECODE,
}
