"""Books the time of every request that is alive in the core, from the clock readings of the host and of the device.

A *running* request is charged by the device's clock. Between two steps the device waited for the host: `compute.host`.
A step is charged by its composition. Its copies of KV from and to slower tiers are `memory.load` and `memory.store` of
all requests in it; its exchanges between ranks are their `compute.communication`, and waits for pipeline stages their
`compute.bubble`. The lag from the end of the device's work to the moment when the token left the
loop is charged once, not for every token. Host work that the device hides costs nothing. Without overlap all of this is
the sum of the stages. Requests that decode pay alike and share the decode clock.

A running request without a share of a step pays `request.interference`, or `request.queue` if it got its place while
that step was computed already. A *waiting* request is charged by the reason for which the head of the queue was
refused: all requests behind the head wait for that reason. A request in a side queue (a fork without its leader's
prompt, a long prompt behind others, a grammar that is not compiled yet) pays `request.queue` for a reason of its own.
Waiting costs nothing per step: each reason has a clock, which a request reads when it begins and ends waiting.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import add, sub
from typing import NamedTuple

from sojourn.engine.request.plan import ScheduledTokens, StepOutcome, StepPlan
from sojourn.engine.request.preparing import Preparing
from sojourn.engine.request.request import Request, State
from sojourn.metrics.compute.cost_model import ModelShape, request_flops
from sojourn.metrics.compute.step_shares import NO_PROMPTS, Work, step_shares
from sojourn.metrics.ledger import CLOCKED, OWN_WORK, STEP_PARTS, Account, book, wait_account
from sojourn.metrics.records import PROMPT_KINDS

HEAD_REASONS = ("batch_cap", "token_budget", "kv_blocks", "policy")  # why the head of the queue is refused


@dataclass(slots=True)
class Turn:
    """Clock readings in nanoseconds. Each but the first ends a stage, in the order of metrics.records.STAGES."""

    begin_ns: int
    received_ns: int
    planned_ns: int = 0
    prepared_ns: int = 0
    launched_ns: int = 0
    waited_ns: int = 0
    sampled_ns: int = 0
    committed_ns: int = 0
    end_ns: int = 0

    def stages(self) -> list[int]:
        """Nanoseconds of each stage of a turn that committed a step; they sum to the turn."""
        readings = (
            self.begin_ns, self.received_ns, self.planned_ns, self.prepared_ns, self.launched_ns, self.waited_ns,
            self.sampled_ns, self.committed_ns, self.end_ns,
        )  # fmt: skip
        return list(map(sub, readings[1:], readings))

    def end_without_step(self) -> None:
        """No step was read: the stages behind `launch` are empty."""
        self.waited_ns = self.sampled_ns = self.committed_ns = self.end_ns = self.launched_ns


class Participants(NamedTuple):
    """The requests of a step when it is committed, before the commit ends some of them."""

    planned: list[Request]  # of the step's items, in their order
    running: list[Request]  # the very list `planned`, if the step has a share of every running request
    preempted: list[Request]  # computed in the step, waiting by now: each emits the token that was under way
    num_overrun: int  # tokens of the step whose requests have ended since it was planned


def participants(plan: StepPlan, running: Sequence[Request]) -> Participants:
    planned = [item.request for item in plan.scheduled]
    if planned == running:
        return Participants(planned, planned, [], 0)
    preempted, overrun = [], 0
    for item in plan.scheduled:
        state = item.request.state
        if state is State.FINISHED:
            overrun += item.new_tokens
        elif state is State.PREEMPTED:
            preempted.append(item.request)
    return Participants(planned, list(running), preempted, overrun)


class DecodeClock:
    """All requests that decode in a step pay the same: the device, the sampler, the host around them, and in a mixed
    step the share of the prompts. So one clock runs for them, in nanoseconds by CLOCKED: a step costs O(1), not
    O(batch). A request subtracts the clock from its ledger when it joins, and adds it when it leaves.

    All members are booked up to the same moment: `booked_ns` on the device, and `lag_ns` of the host's time after it.
    """

    def __init__(self) -> None:
        self.members: list[Request] = []  # in the order of the step that they share
        self.clock_ns = (0,) * len(CLOCKED)
        self.rejected_ns = 0  # of what is booked to compute.decode: what rejected drafts took
        self.booked_ns = self.lag_ns = 0
        self.committed_ns = 0  # of the last step: all that ran in it are booked up to here

    def tick(self, *step_ns: int) -> None:
        """Books a step to every member: nanoseconds by CLOCKED."""
        self.clock_ns = tuple(map(add, self.clock_ns, step_ns))

    def join(self, request: Request) -> None:
        """A request is booked as far as the members. The caller adds it to `members`."""
        ledger = request.booking.ledger
        for account, ns in zip(CLOCKED, self.clock_ns, strict=True):
            ledger[account] -= ns
        request.booking.rejected_mark_ns = self.rejected_ns
        request.booking.clocked = request.booking.ledger_changed = True

    def leave(self, request: Request) -> None:
        """Makes its ledger whole. The caller takes it out of `members`."""
        book(request.booking.ledger, CLOCKED, self.clock_ns)
        request.booking.rejected_ns += self.rejected_ns - request.booking.rejected_mark_ns
        request.booking.clocked = False
        request.booking.booked_ns, request.booking.lag_ns = self.booked_ns, self.lag_ns

    def remove(self, request: Request) -> None:
        """A request ends, or is preempted: `leave`, and out of `members`, if it is in them."""
        if request.booking.clocked:
            self.leave(request)
            self.members = [member for member in self.members if member is not request]

    def base(self, request: Request) -> list[int]:
        """The ledger of any request without the clock. A reader adds the clock of its own moment."""
        ledger = list(request.booking.ledger)
        if not request.booking.clocked:
            for account, ns in zip(CLOCKED, self.clock_ns, strict=True):
                ledger[account] -= ns
        return ledger


class Accountant:
    """Owns the wait clocks and the decode clock. The shares of a step's device time are weighed by their FLOPs.

    Everything is booked from the two readings around it. Time between two turns that no stage holds stays unaccounted.
    """

    def __init__(self, shape: ModelShape):
        self.clock = DecodeClock()
        self._shape = shape
        self._waited = dict.fromkeys(HEAD_REASONS, 0)  # reason → how long the head was refused for it
        self._decided_ns: int | None = None  # the last plan, if it left requests waiting
        self._head_blocked_by = HEAD_REASONS[-1]
        self._preparing: dict[int, tuple[int, Preparing]] = {}  # arrival index → since when the runner prepares
        self._arrived: dict[int, tuple[Request, int]] = {}  # arrival index → since when it waits
        self._pauses: list[tuple[int, int]] = []  # between turns since the last step

    def paused(self, begin_ns: int, end_ns: int) -> None:
        """Between two turns of the loop."""
        if begin_ns < end_ns:
            self._pauses.append((begin_ns, end_ns))

    def received(
        self, request: Request, encoded_ns: int, turn: Turn, last: Turn | None, preparation: Preparing | None
    ) -> None:
        """A request was handed over. While a step ran the loop could not see it: that part is waiting."""
        begin_ns, end_ns = (last.begin_ns, last.end_ns) if last is not None else (encoded_ns, encoded_ns)
        received_ns = turn.received_ns
        step_began_ns = min(max(begin_ns, encoded_ns), received_ns)
        step_ns = min(max(end_ns, step_began_ns), received_ns) - step_began_ns
        _book_wait(request, Account.REQUEST_QUEUE, "step", step_ns)
        request.booking.ledger[Account.REQUEST_ADMISSION] += received_ns - encoded_ns - step_ns
        request.booking.queued_ns = received_ns
        if preparation is not None:
            self._preparing[request.arrival_index] = received_ns, preparation
        else:
            self._arrived[request.arrival_index] = (request, received_ns)

    def released(self, request: Request, now_ns: int) -> None:
        """The runner is ready for a request: it may be scheduled."""
        self._end_preparing(request, now_ns)
        self._arrived[request.arrival_index] = (request, now_ns)

    def planned(self, plan: StepPlan, turn: Turn) -> None:
        """A step was planned: the wait clocks advance, requests that were admitted stop waiting, new ones start."""
        now_ns = plan.planned_ns = turn.planned_ns
        if self._decided_ns is None and not (
            plan.num_waiting or self._arrived or plan.preempted or plan.admitted or plan.side_queue_moves
        ):
            return  # no request waits, and none did
        self._advance(now_ns)
        if self._arrived or plan.preempted or plan.side_queue_moves:
            self._begin_waits(plan, turn.begin_ns, now_ns)
        for request in plan.admitted:
            self._end_wait(request)
            request.booking.booked_ns, request.booking.lag_ns = now_ns, 0
            if request.booking.scheduled_ns is None:
                request.booking.scheduled_ns = now_ns
        self._decided_ns = now_ns if plan.num_waiting else None
        self._head_blocked_by = plan.head_blocked_by or HEAD_REASONS[-1]  # None: the queue is empty

    def executed(self, plan: StepPlan, participants: Participants, outcome: StepOutcome, committed_ns: int) -> None:
        """A step is over: books the device's time to its participants, and their absence to the other requests."""
        clock, running = self.clock, participants.running
        device_ns = outcome.device_ns + outcome.draft_ns - sum(outcome.parts_ns)
        lag_ns = self._host_ns(outcome.device_end_ns, committed_ns)  # with the drafts of the next step
        rejected_ns = self._rejected_ns(plan, outcome, device_ns)
        clock.rejected_ns += rejected_ns
        if not plan.has_prompts and running is participants.planned and running == clock.members:
            self._tick(0, device_ns, outcome, lag_ns)
        else:
            self._book_shares(plan, participants, device_ns, outcome, lag_ns, rejected_ns)
            if len(clock.members) < len(running):
                self._book_absence(participants, outcome, committed_ns)
            if participants.preempted:
                self._advance(committed_ns)
                for request in participants.preempted:
                    self._end_wait(request)
                    request.booking.wait_mark, request.booking.ledger_changed = tuple(self._waited.values()), True
        clock.booked_ns, clock.lag_ns, clock.committed_ns = outcome.device_end_ns, lag_ns, committed_ns
        self._pauses.clear()

    def ended_between_steps(self, request: Request, waited: bool, now_ns: int) -> None:
        """A request ended between two steps, while it waited or while it ran."""
        if request.arrival_index in self._preparing:
            self._end_preparing(request, now_ns)
        elif request.arrival_index in self._arrived:
            _book_wait(request, Account.REQUEST_QUEUE, "step", now_ns - self._arrived.pop(request.arrival_index)[1])
        elif waited:
            self._advance(now_ns)
            self._end_wait(request)
        else:
            self._end_running(request, now_ns)

    def _end_preparing(self, request: Request, now_ns: int) -> None:
        """What a request waited for that has an account of its own; what a grammar took longer is waiting."""
        since_ns, preparation = self._preparing.pop(request.arrival_index)
        for account, until_ns in preparation.accounts(since_ns, now_ns):
            request.booking.ledger[account] += until_ns - since_ns
            since_ns = until_ns
        _book_wait(request, Account.REQUEST_QUEUE, "grammar", now_ns - since_ns)

    def _begin_waits(self, plan: StepPlan, begin_ns: int, now_ns: int) -> None:
        mark = tuple(self._waited.values())
        for request, since_ns in self._arrived.values():
            _book_wait(request, Account.REQUEST_QUEUE, "step", begin_ns - since_ns)  # in a turn without a decision
            request.booking.ledger[Account.COMPUTE_HOST] += now_ns - max(begin_ns, since_ns)
            request.booking.wait_mark = mark
        self._arrived.clear()
        for preemption in plan.preempted:
            self._end_running(preemption.request, now_ns)
            preemption.request.booking.wait_mark = mark
        for request, aside in plan.side_queue_moves:
            if request.state is not State.FINISHED:
                self._end_wait(request)
                request.booking.wait_mark, request.booking.waits_aside = mark, aside

    def _rejected_ns(self, plan: StepPlan, outcome: StepOutcome, device_ns: int) -> int:
        """The part of a step's time that its rejected drafts took, by their FLOPs."""
        if not plan.num_drafts:
            return 0
        rejected = total = 0
        for item in plan.scheduled:
            drafted = len(item.drafts)
            total += request_flops(self._shape, item.new_tokens, item.past_tokens, item.samples + drafted)
            unused = 1 + drafted - max(1, len(outcome.sampled.get(item.request.id, ())))
            if drafted and unused:
                rejected += request_flops(self._shape, unused, item.past_tokens + item.new_tokens - unused, unused)
        return device_ns * rejected // total

    def _book_shares(
        self, plan: StepPlan, participants: Participants, device_ns: int, outcome: StepOutcome, lag_ns: int,
        rejected_ns: int,
    ) -> None:  # fmt: skip
        """Books a step with prompts in it, or with another batch than the step before."""
        clock, items = self.clock, plan.scheduled
        shares = step_shares(self._shape, [_work(item) for item in items]) if plan.has_prompts else NO_PROMPTS
        if participants.running is not participants.planned:
            running = {request.arrival_index for request in participants.running}
            items = [item for item in items if item.request.arrival_index in running]
        others = [item for item in items if not item.request.booking.clocked or item.kind in PROMPT_KINDS]
        if len(items) - len(others) < len(clock.members):
            staying = {item.request.arrival_index for item in items} - {item.request.arrival_index for item in others}
            for request in clock.members:
                if request.arrival_index not in staying:
                    clock.leave(request)
        interference_ns = shares.interference_ns(device_ns)
        self._tick(interference_ns, device_ns - interference_ns, outcome, lag_ns)
        for item in others:
            request = item.request
            offence_ns = shares.interference_ns(device_ns, request.arrival_index)
            ledger = request.booking.ledger
            ledger[Account.REQUEST_INTERFERENCE] += offence_ns
            ledger[OWN_WORK[item.kind]] += device_ns - offence_ns
            book(ledger, STEP_PARTS, outcome.parts_ns)
            if item.kind not in PROMPT_KINDS:
                request.booking.rejected_ns += rejected_ns
            gap_ns = self._gap_ns(request.booking.booked_ns, outcome.device_begin_ns)
            ledger[Account.COMPUTE_HOST] += gap_ns + lag_ns - outcome.draft_ns - request.booking.lag_ns
            request.booking.booked_ns, request.booking.lag_ns = outcome.device_end_ns, lag_ns
            if item.samples:
                clock.join(request)
        clock.members = [item.request for item in items if item.request.booking.clocked]

    def _tick(self, interference_ns: int, decode_ns: int, outcome: StepOutcome, lag_ns: int) -> None:
        clock = self.clock
        gap_ns = self._gap_ns(clock.booked_ns, outcome.device_begin_ns)
        host_ns = gap_ns + lag_ns - outcome.draft_ns - clock.lag_ns
        clock.tick(interference_ns, decode_ns, host_ns, *outcome.parts_ns)

    def _book_absence(self, participants: Participants, outcome: StepOutcome, committed_ns: int) -> None:
        took_part = {request.arrival_index for request in participants.planned}
        begin_ns, end_ns = outcome.device_begin_ns, outcome.device_end_ns
        for request in participants.running:
            if request.arrival_index in took_part:
                continue
            ledger, mark = request.booking.ledger, request.booking.booked_ns
            host_ns = self._host_ns(max(mark, end_ns), committed_ns)
            draft_ns = outcome.draft_ns if mark <= end_ns else 0
            ledger[Account.COMPUTE_DRAFT] += draft_ns
            if mark < begin_ns:
                ledger[Account.REQUEST_INTERFERENCE] += end_ns - begin_ns
                ledger[Account.COMPUTE_HOST] += self._host_ns(mark, begin_ns)
            elif mark < end_ns:
                _book_wait(request, Account.REQUEST_QUEUE, "step", end_ns - mark)
            ledger[Account.COMPUTE_HOST] += host_ns - draft_ns - request.booking.lag_ns
            request.booking.booked_ns, request.booking.lag_ns = max(mark, end_ns), host_ns

    def _end_running(self, request: Request, now_ns: int) -> None:
        """Books the host's time since the last commit, or since the request got its place."""
        self.clock.remove(request)
        since_ns = max(request.booking.booked_ns, self.clock.committed_ns)
        request.booking.ledger[Account.COMPUTE_HOST] += self._host_ns(since_ns, now_ns)

    def _gap_ns(self, booked_ns: int, begin_ns: int) -> int:
        """The host's time between two steps; none if the device went from one to the other by itself."""
        return self._host_ns(booked_ns, begin_ns) if booked_ns < begin_ns else 0

    def _host_ns(self, begin_ns: int, end_ns: int) -> int:
        """The time between two readings, without pauses."""
        if not self._pauses:
            return end_ns - begin_ns
        idle_ns = sum(max(0, min(end, end_ns) - max(begin, begin_ns)) for begin, end in self._pauses)
        return end_ns - begin_ns - idle_ns

    def _advance(self, now_ns: int) -> None:
        """Moves the wait clock of the reason that blocks the head of the queue to now."""
        if self._decided_ns is not None:
            self._waited[self._head_blocked_by] += now_ns - self._decided_ns
            self._decided_ns = now_ns

    def _end_wait(self, request: Request) -> None:
        for (reason, waited_ns), since_ns in zip(self._waited.items(), request.booking.wait_mark, strict=True):
            reason = request.booking.waits_aside or reason
            _book_wait(request, wait_account(reason, request.counts.preemptions > 0), reason, waited_ns - since_ns)


def _book_wait(request: Request, account: Account, reason: str, waited_ns: int) -> None:
    """Time that a request waited, by account and by reason. A wait that has not begun is none."""
    if waited_ns > 0:
        request.booking.ledger[account] += waited_ns
        request.booking.waits[reason] = request.booking.waits.get(reason, 0) + waited_ns


def _work(item: ScheduledTokens) -> Work:
    rows = item.samples + len(item.drafts)
    return Work(item.request.arrival_index, item.kind, item.new_tokens, item.past_tokens, rows)
