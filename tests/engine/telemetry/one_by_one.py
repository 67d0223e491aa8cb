"""The oracle of the accountant: books every step to every request by itself, with no clock that requests share."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from sojourn.engine.request.plan import StepOutcome, StepPlan
from sojourn.engine.request.request import Request, State
from sojourn.engine.telemetry.accounting import Accountant, Participants, Turn
from sojourn.metrics.compute.cost_model import ModelShape, request_flops
from sojourn.metrics.ledger import OWN_WORK, Account, ledger_at, new_ledger

DECODES = ("decode", "verify")


@dataclass(slots=True)
class Page:
    """One request's own ledger, and up to when it is booked."""

    ledger: list[int] = field(default_factory=new_ledger)
    booked_ns: int = 0
    lag_ns: int = 0
    since_ns: int | None = None  # when it began to wait for its first decision
    is_preparing: bool = False
    mark: tuple[int, int] = (0, 0)
    aside: bool = False
    reads_adapter: bool = False


class OneByOne:
    """Hears what the accountant hears. `pages` holds the ledgers by the request's order."""

    def __init__(self, shape: ModelShape):
        self.pages: dict[int, Page] = {}
        self._shape = shape
        self._queue_ns = self._blocked_ns = self._committed_ns = 0
        self._decided_ns: int | None = None
        self._head_blocked_by: str | None = None
        self._pauses: list[tuple[int, int]] = []

    def paused(self, begin_ns: int, end_ns: int) -> None:
        if begin_ns < end_ns:
            self._pauses.append((begin_ns, end_ns))

    def received(self, request, encoded_ns, turn: Turn, last: Turn | None, preparation) -> None:
        now_ns = turn.received_ns
        page = self.pages[request.arrival_index] = Page(since_ns=now_ns, is_preparing=preparation is not None)
        page.reads_adapter = preparation is not None and preparation.waits_for == "adapter"
        begin_ns, end_ns = (last.begin_ns, last.end_ns) if last is not None else (encoded_ns, encoded_ns)
        began_ns = min(max(begin_ns, encoded_ns), now_ns)
        ended_ns = min(max(end_ns, began_ns), now_ns)
        page.ledger[Account.REQUEST_QUEUE] += ended_ns - began_ns
        page.ledger[Account.REQUEST_ADMISSION] += now_ns - encoded_ns - (ended_ns - began_ns)

    def released(self, request, now_ns) -> None:
        page = self.pages[request.arrival_index]
        page.ledger[Account.MEMORY_ADAPTER_LOAD if page.reads_adapter else Account.REQUEST_QUEUE] += (
            now_ns - page.since_ns
        )
        page.since_ns, page.is_preparing = now_ns, False

    def planned(self, plan: StepPlan, turn: Turn) -> None:
        begin_ns, now_ns = turn.begin_ns, turn.planned_ns
        self._advance(now_ns)
        for page in self.pages.values():
            if page.since_ns is not None and not page.is_preparing:
                page.ledger[Account.REQUEST_QUEUE] += max(0, begin_ns - page.since_ns)
                page.ledger[Account.COMPUTE_HOST] += now_ns - max(begin_ns, page.since_ns)
                page.since_ns, page.mark = None, (self._queue_ns, self._blocked_ns)
        for preemption in plan.preempted:
            self._end_running(self.pages[preemption.request.arrival_index], now_ns)
        for request, aside in plan.side_queue_moves:
            if request.state is not State.FINISHED:
                self._end_wait(request)
                self.pages[request.arrival_index].aside = aside is not None
        for request in plan.admitted:
            self._end_wait(request)
            self.pages[request.arrival_index].booked_ns, self.pages[request.arrival_index].lag_ns = now_ns, 0
        self._decided_ns = now_ns if plan.num_waiting else None
        self._head_blocked_by = plan.head_blocked_by

    def executed(self, plan: StepPlan, present: Participants, outcome: StepOutcome, committed_ns: int) -> None:
        begin_ns, end_ns, sampling_ns = outcome.device_begin_ns, outcome.device_end_ns, outcome.sampling_ns
        lag_ns, device_ns = self._host_ns(end_ns, committed_ns), end_ns - begin_ns - sampling_ns
        device_ns -= outcome.load_ns + outcome.store_ns + outcome.communication_ns + outcome.bubble_ns
        weights = {
            item.request.arrival_index: request_flops(
                self._shape, item.new_tokens, item.past_tokens, item.samples + len(item.drafts)
            )
            for item in plan.scheduled
        }
        prompts = sum(weights[item.request.arrival_index] for item in plan.scheduled if item.kind not in DECODES)
        kinds = {item.request.arrival_index: item.kind for item in plan.scheduled}
        for request in present.running:
            page = self.pages[request.arrival_index]
            ledger = page.ledger
            if request.arrival_index in kinds:
                kind = kinds[request.arrival_index]
                others = prompts if kind in DECODES else prompts - weights[request.arrival_index]
                interference = device_ns * others // sum(weights.values())
                ledger[Account.REQUEST_INTERFERENCE] += interference
                ledger[OWN_WORK[kind]] += device_ns - interference
                ledger[Account.TOKEN_SAMPLE] += sampling_ns
                ledger[Account.COMPUTE_DRAFT] += outcome.draft_ns
                ledger[Account.MEMORY_LOAD] += outcome.load_ns
                ledger[Account.MEMORY_STORE] += outcome.store_ns
                ledger[Account.COMPUTE_COMMUNICATION] += outcome.communication_ns
                ledger[Account.COMPUTE_BUBBLE] += outcome.bubble_ns
                gap_ns = self._host_ns(page.booked_ns, begin_ns) if page.booked_ns < begin_ns else 0
                ledger[Account.COMPUTE_HOST] += gap_ns + lag_ns - outcome.draft_ns - page.lag_ns
                page.booked_ns, page.lag_ns = end_ns, lag_ns
            else:
                self._book_absence(page, begin_ns, end_ns, committed_ns, outcome.draft_ns)
        for request in present.preempted:
            self._advance(committed_ns)
            self._end_wait(request)
        self._committed_ns = committed_ns
        self._pauses.clear()

    def _book_absence(self, page: Page, begin_ns: int, end_ns: int, committed_ns: int, draft_ns: int) -> None:
        mark, ledger = page.booked_ns, page.ledger
        host_ns = self._host_ns(max(mark, end_ns), committed_ns)
        ledger[Account.COMPUTE_DRAFT] += draft_ns
        if mark < begin_ns:
            ledger[Account.REQUEST_INTERFERENCE] += end_ns - begin_ns
            ledger[Account.COMPUTE_HOST] += self._host_ns(mark, begin_ns)
        elif mark < end_ns:
            ledger[Account.REQUEST_QUEUE] += end_ns - mark
        ledger[Account.COMPUTE_HOST] += host_ns - draft_ns - page.lag_ns
        page.booked_ns, page.lag_ns = max(mark, end_ns), host_ns

    def ended_between_steps(self, request: Request, waited: bool, now_ns: int) -> None:
        page = self.pages[request.arrival_index]
        if page.since_ns is not None:
            reads = page.is_preparing and page.reads_adapter
            page.ledger[Account.MEMORY_ADAPTER_LOAD if reads else Account.REQUEST_QUEUE] += now_ns - page.since_ns
            page.since_ns = None
        elif waited:
            self._advance(now_ns)
            self._end_wait(request)
        else:
            self._end_running(page, now_ns)

    def _end_running(self, page: Page, now_ns: int) -> None:
        page.ledger[Account.COMPUTE_HOST] += self._host_ns(max(page.booked_ns, self._committed_ns), now_ns)
        page.mark = (self._queue_ns, self._blocked_ns)

    def _host_ns(self, begin_ns: int, end_ns: int) -> int:
        idle_ns = sum(max(0, min(end, end_ns) - max(begin, begin_ns)) for begin, end in self._pauses)
        return end_ns - begin_ns - idle_ns

    def _advance(self, now_ns: int) -> None:
        if self._decided_ns is not None:
            if self._head_blocked_by == "kv_blocks":
                self._blocked_ns += now_ns - self._decided_ns
            else:
                self._queue_ns += now_ns - self._decided_ns
            self._decided_ns = now_ns

    def _end_wait(self, request: Request) -> None:
        page = self.pages[request.arrival_index]
        queue_ns, blocked_ns = self._queue_ns - page.mark[0], self._blocked_ns - page.mark[1]
        page.mark = (self._queue_ns, self._blocked_ns)
        if request.counts.preemptions:
            page.ledger[Account.MEMORY_PREEMPTED] += queue_ns + blocked_ns
        elif page.aside:
            page.ledger[Account.REQUEST_QUEUE] += queue_ns + blocked_ns
        else:
            page.ledger[Account.REQUEST_QUEUE] += queue_ns
            page.ledger[Account.MEMORY_BLOCKED] += blocked_ns


class BothAccountants:
    """Calls two accountants alike, and compares them after every step and at every end."""

    def __init__(self, accountant: Accountant, oracle: OneByOne):
        self.accountant, self.oracle = accountant, oracle
        self.steps = 0
        self.ledgers: dict[tuple[str, int], list[int]] = {}  # by id and commit, of all requests that were present

    @property
    def clock(self):
        return self.accountant.clock

    def __getattr__(self, name: str):
        def call(*arguments, **named):
            getattr(self.oracle, name)(*arguments, **named)
            return getattr(self.accountant, name)(*arguments, **named)

        return call

    def executed(self, plan: StepPlan, participants: Participants, outcome: StepOutcome, committed_ns: int) -> None:
        for accountant in (self.oracle, self.accountant):
            accountant.executed(plan, participants, outcome, committed_ns)
        present = [*participants.running, *participants.preempted]
        self.compare(present)
        self.ledgers |= {(r.id, committed_ns): list(self.oracle.pages[r.arrival_index].ledger) for r in present}
        self.steps += 1

    def ended_between_steps(self, request: Request, waited: bool, now_ns: int) -> None:
        for books in (self.oracle, self.accountant):
            books.ended_between_steps(request, waited, now_ns)
        assert not request.booking.clocked
        self.compare([request])

    def compare(self, requests: Sequence[Request]) -> None:
        clock = self.accountant.clock
        for request in requests:
            ledger = list(request.booking.ledger)
            if request.booking.clocked:
                assert any(member is request for member in clock.members)
                ledger = ledger_at(ledger, clock.clock_ns)
            assert ledger == self.oracle.pages[request.arrival_index].ledger, request.id
