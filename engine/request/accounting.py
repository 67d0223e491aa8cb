"""Books the time of every request that is alive in the core, from the clock readings of the steps.

A cycle reaches from one scheduling decision to the next. Who computes in it pays for its stages; who runs but got no
share pays `request.interference`; who waits pays by the reason for which the head of the line was refused, because
that reason is what everyone behind it waits for. Who is held aside (a fork without its leader's prompt, a long prompt
behind others) pays `request.queue`. Waiting costs nothing per step: two clocks run, and each request reads them when it
begins and when it ends waiting.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.request.plan import StepPlan
from engine.request.request import Request, State
from metrics.ledger import Account

MEMORY_REASONS = ("kv_blocks",)


@dataclass(frozen=True, slots=True)
class StepClock:
    """The readings of one step, in nanoseconds. Neighbours enclose a stage of metrics.records.STAGES."""

    begin: int
    received: int
    planned: int
    prepared: int
    launched: int
    waited: int
    sampled: int
    committed: int = 0


class Accountant:
    """Owns the wait clocks. `flops(new_tokens, past_tokens, sampled)` weighs the shares of a step's device time.

    Everything is booked from the two readings around it. Time between two steps that no stage holds stays unaccounted.
    """

    def __init__(self, flops: Callable[[int, int, int], int]):
        self._flops = flops
        self._publish_ns = 0  # of the last step: the host's, for those who run on
        self._queue_ns = 0  # time that the head of the queue waited for a place or the budget, so far
        self._blocked_ns = 0  # ... and for KV blocks
        self._decided_ns: int | None = None  # the last decision, if it left somebody waiting
        self._held_back_by: str | None = None

    def visible(self, request: Request, encoded_ns: int, received_ns: int, last_step: tuple[int, int] | None) -> None:
        """A request was handed over. While a step ran it could not have been seen: that part is waiting."""
        begin_ns, end_ns = last_step or (encoded_ns, encoded_ns)
        step_began_ns = min(max(begin_ns, encoded_ns), received_ns)
        step_ended_ns = min(max(end_ns, step_began_ns), received_ns)
        request.ledger[Account.REQUEST_QUEUE] += step_ended_ns - step_began_ns
        request.ledger[Account.REQUEST_ADMISSION] += (step_began_ns - encoded_ns) + (received_ns - step_ended_ns)

    def planned(
        self, plan: StepPlan, running: Sequence[Request], arrived: Sequence[Request], begin_ns: int, received_ns: int,
        now_ns: int,
    ) -> None:  # fmt: skip
        """A decision was taken: the wait clocks advance, who was admitted reads them, who was refused starts to."""
        self._advance(now_ns)
        mark = (self._queue_ns, self._blocked_ns)
        for request in arrived:
            request.ledger[Account.COMPUTE_HOST] += now_ns - received_ns
            request.wait_mark = mark
        for request in plan.preempted:
            request.wait_mark = mark
        for request, aside in plan.moves:
            if request.state is not State.FINISHED:
                self._end_wait(request)
                request.wait_mark, request.waits_aside = mark, aside
        admitted = {request.order for request in plan.admitted}
        for request in plan.admitted:
            self._end_wait(request)
        for request in [*running, *plan.preempted]:
            if request.order not in admitted:
                request.ledger[Account.COMPUTE_HOST] += self._publish_ns + (now_ns - begin_ns)
        self._decided_ns = now_ns if plan.num_waiting else None
        self._held_back_by = plan.held_back_by

    def executed(self, plan: StepPlan, running: Sequence[Request], clock: StepClock) -> int:
        """A step is over: books its stages to those who took part, and their absence to those who run and did not.

        Returns the step's FLOPs, by whose shares the device time was divided.
        """
        device_ns = clock.waited - clock.launched
        host_ns = (clock.launched - clock.planned) + (clock.committed - clock.sampled)
        weights = [self._flops(item.new_tokens, item.past_tokens, int(item.samples)) for item in plan.scheduled]
        total = sum(weights)
        prompts = sum(w for w, item in zip(weights, plan.scheduled, strict=True) if item.kind != "decode")
        took_part = set()
        for weight, item in zip(weights, plan.scheduled, strict=True):
            ledger = item.request.ledger
            others = prompts - (weight if item.kind != "decode" else 0)
            interference = device_ns * others // total
            ledger[Account.REQUEST_INTERFERENCE] += interference
            ledger[_OWN_WORK[item.kind]] += device_ns - interference
            ledger[Account.TOKEN_SAMPLE] += clock.sampled - clock.waited
            ledger[Account.COMPUTE_HOST] += host_ns
            took_part.add(item.request.order)
        for request in running:
            if request.order not in took_part:
                request.ledger[Account.REQUEST_INTERFERENCE] += clock.committed - clock.planned
        return total

    def published(self, duration_ns: int) -> None:
        """The step before this moment told the front what it gave."""
        self._publish_ns = duration_ns

    def aborted(self, request: Request, waited: bool, begin_ns: int, now_ns: int) -> None:
        """A request ended between two steps, while it waited or while it ran."""
        if waited:
            self._advance(now_ns)
            self._end_wait(request)
        else:
            request.ledger[Account.COMPUTE_HOST] += self._publish_ns + (now_ns - begin_ns)

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


_OWN_WORK = {
    "prefill": Account.COMPUTE_PREFILL,
    "recompute": Account.MEMORY_RECOMPUTE,
    "decode": Account.COMPUTE_DECODE,
    "verify": Account.COMPUTE_DECODE,
}
