"""The loop: receive → schedule → launch → collect → commit → publish → observe.

Pure of sockets; the clock and the runner are given.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

from sojourn.engine.messages import Abort, FromCore, KVEvents, Observed, Output, Submit, ToCore, Tokens
from sojourn.engine.request.plan import LaunchedStep, Preemption, Runner, StepOutcome, StepPlan
from sojourn.engine.request.preparing import Preparing
from sojourn.engine.request.request import Request, State
from sojourn.engine.request.scheduler import Emitted, Scheduler
from sojourn.engine.telemetry.accounting import Turn
from sojourn.engine.telemetry.ended import ended_message
from sojourn.engine.telemetry.observer import EngineObserver
from sojourn.metrics.records import StepRecord

ENDS_WITH_TOKEN = ("stop", "length")  # finish reasons that a last token carries; of an error the front needs its text


class Engine:
    """Runs steps while there is work. `publish` is handed two messages a step: tokens, then observations, and
    behind them KV events where they are wanted.

    With `overlap` a step is planned and launched before the one before it is read: the host works while the device
    does. Without, each step is read before the next one is planned. With `pipeline_stages` as many steps are under way,
    of different requests. What stands around the loop are the scheduler's techniques.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        observer: EngineObserver,
        publish: Callable[[FromCore], None],
        *,
        first_step: int = 0,
        overlap: bool = False,
        pipeline_stages: int = 1,
        clock: Callable[[], int] = time.monotonic_ns,
    ):
        self.scheduler = scheduler
        self.runner = runner
        self.observer = observer
        self.publish = publish
        self.techniques = scheduler.techniques
        self.clock = clock
        self.step_number = first_step
        # Steps under way while the next one is planned: of a pipeline one for each stage, or the one that overlaps.
        self._most_under_way = pipeline_stages if pipeline_stages > 1 else 1 + overlap
        self._arrivals = 0
        self._under_way: deque[LaunchedStep] = deque()  # launched, and not read yet
        self._turn = Turn(0, 0)
        self._last_turn: Turn | None = None
        self._admitted: list[Request] = []  # since the last message
        self._preempted: list[Preemption] = []  # in plans that nothing was launched for
        self._preparing: list[Preparing] = []  # not scheduled yet
        self._ended: list[tuple[Request, int]] = []  # since the last message, with the end of their ledgers

    @property
    def has_work(self) -> bool:
        return bool(self._under_way) or self.scheduler.has_work

    @property
    def num_preparing(self) -> int:
        """Requests that may not be scheduled yet."""
        return len(self._preparing)

    @property
    def is_preparing(self) -> bool:
        """Some requests may not be scheduled yet, or a technique waits; `receive` sees whether that is over."""
        return bool(self._preparing) or any(technique.is_waiting for technique in self.techniques)

    def step(self) -> int:
        """One turn, after `receive`: plan and launch a step, then read one, publish its tokens, and observe it.

        Returns when the turn ended, in nanoseconds.
        """
        turn = self._turn
        self._observe_pause(turn)
        plan = self._plan(turn)
        if plan is not None:
            self._launch(plan, turn)
        if self._must_collect(is_launched=plan is not None):
            plan, outcome = self._collect(turn)
            emitted = self._commit(plan, outcome, turn)
            self._publish(emitted, outcome, turn)
            self._observe(plan, outcome, emitted, turn)
        else:
            turn.end_without_step()
            self.observer.passed(turn)
        self._last_turn = turn
        return turn.end_ns

    def receive(self, messages: Sequence[ToCore], begin_ns: int) -> None:
        """Takes in what the front sent. The turn began at `begin_ns`: without a pause, the end of the one before."""
        self.scheduler.block_observer.now_ns = begin_ns
        for technique in self.techniques:
            technique.poll()
        self._take_ended()
        released, ended = self._release()
        arrived: list[tuple[Request, int, Preparing | None]] = []
        for message in messages:
            if isinstance(message, Submit):
                request = self._request(message)
                preparing = self._prepare(request, message)
                arrived.append((request, message.encoded_ns, preparing))
            elif isinstance(message, Abort):
                ended += self._abort(message.request_id)
            else:
                for technique in self.techniques:
                    technique.take(message)
        turn = self._turn = Turn(begin_ns, self.clock())
        for request, encoded_ns, preparing in arrived:
            self.observer.received(request, encoded_ns, turn, self._last_turn, preparing)
        self._answer()
        for request in released:
            self.observer.released(request, turn.received_ns)
        for request, waited in ended:
            self.observer.ended_between_steps(request, waited, turn.received_ns)
            self._ended.append((request, turn.received_ns))

    def flush(self) -> None:
        """Reports the requests that ended between two steps. Call it where no step follows."""
        self.scheduler.block_observer.flush()
        self._take_ended()  # also while no message comes: leases expire
        if self._ended:
            self.publish(self._tokens(self.clock(), []))
        self._report(None)
        if not self._under_way:
            for technique in self.techniques:
                technique.rest()

    def close(self) -> None:
        """The loop ends: techniques finish what is under way, and the other ranks of a group end."""
        for technique in self.techniques:
            technique.close()
        self.runner.close()

    def _observe_pause(self, turn: Turn) -> None:
        last_ns = None if self._last_turn is None else self._last_turn.end_ns
        if last_ns is None or last_ns < turn.begin_ns:
            self.observer.idle(last_ns, turn.begin_ns)

    def _plan(self, turn: Turn) -> StepPlan | None:
        """The next step. None where it has to wait for the commit of the one under way, or would compute nothing."""
        turn.planned_ns = turn.prepared_ns = turn.launched_ns = turn.received_ns
        if self._under_way and self._under_way[-1].plan.needs_commit:
            return None
        plan = self.scheduler.schedule()
        for preparing in self._preparing:
            reason = preparing.waits_for
            plan.refusals[reason] = plan.refusals.get(reason, 0) + 1
        turn.planned_ns = turn.prepared_ns = turn.launched_ns = self.clock()
        self.observer.planned(plan, turn)
        self._admitted += plan.admitted
        self._preempted += plan.preempted
        if not plan.scheduled:  # the last tokens of all running requests are under way
            return None
        plan.preempted, self._preempted = self._preempted, []
        return plan

    def _launch(self, plan: StepPlan, turn: Turn) -> None:
        plan.follows = self._last_turn is not None and self._last_turn.end_ns >= turn.begin_ns
        for technique in self.techniques:
            technique.launching(plan)
        handle = self.runner.launch(plan)
        self._under_way.append(handle)
        turn.prepared_ns, turn.launched_ns = handle.prepared_ns, handle.launched_ns

    def _must_collect(self, *, is_launched: bool) -> bool:
        """With overlap, or with stages that compute different steps, some stay under way while the next is planned."""
        stays = is_launched and len(self._under_way) < self._most_under_way
        return bool(self._under_way) and not stays

    def _collect(self, turn: Turn) -> tuple[StepPlan, StepOutcome]:
        """Reads the oldest step under way; waits for the device."""
        launched = self._under_way.popleft()
        outcome = self.runner.collect(launched)
        turn.waited_ns, turn.sampled_ns = outcome.waited_ns, outcome.sampled_ns
        for technique in self.techniques:
            technique.collected(launched.plan, outcome)
        return launched.plan, outcome

    def _commit(self, plan: StepPlan, outcome: StepOutcome, turn: Turn) -> list[Emitted]:
        self.observer.collected(plan, self.scheduler.micro_batches.present(self.scheduler.running, plan))
        emitted = self.scheduler.commit(plan, outcome, self.step_number)
        self.step_number += 1
        turn.committed_ns = self.clock()
        self.observer.committed(plan, outcome, turn)
        return emitted

    def _publish(self, emitted: list[Emitted], outcome: StepOutcome, turn: Turn) -> None:
        outputs = [self._output(item, outcome) for item in emitted if item.token_id is not None]
        self.publish(self._tokens(turn.committed_ns, outputs))

    def _observe(self, plan: StepPlan, outcome: StepOutcome, emitted: list[Emitted], turn: Turn) -> None:
        """What no token waits for: the index of blocks, the ends of requests, the record of the step."""
        self.scheduler.block_observer.flush()
        self.scheduler.budget.observe(plan, outcome)
        turn.end_ns = self.clock()
        record = self.observer.observed(self.step_number - 1, plan, outcome, emitted, turn)
        for item in emitted:
            if item.finish_reason is not None:
                self.runner.forget(item.request.id)
                if not any(technique.keeps(item.request, turn.committed_ns) for technique in self.techniques):
                    self._ended.append((item.request, turn.committed_ns))
        self._take_ended()
        self._report(record)

    def _report(self, record: StepRecord | None) -> None:
        if record is not None or self._ended:
            size = self.scheduler.pool.block_size
            ends = [ended_message(request, booked_ns, size, self.techniques) for request, booked_ns in self._ended]
            self.publish(Observed(record, ends))
            self._ended = []
        if (batch := self.scheduler.pool.take_events()) is not None:
            self.publish(KVEvents(batch))

    def _tokens(self, committed_ns: int, outputs: list[Output]) -> Tokens:
        admitted, self._admitted = self._admitted, []
        return Tokens(
            committed_ns=committed_ns,
            clock_ns=self.observer.clock.clock_ns,
            admitted=[(request.id, request.counts.cached_tokens) for request in admitted],
            outputs=outputs,
            next_step=self.step_number,
            blocks=self.scheduler.pool.counts(),
            waiting=self.scheduler.num_waiting,
            running=len(self.scheduler.running),
        )

    def _output(self, emitted: Emitted, outcome: StepOutcome) -> Output:
        request = emitted.request
        is_first = request.output_tokens == 1 and request.sampling.prompt_logprobs is not None
        return Output(
            request.id,
            emitted.token_id,
            self.observer.ledger_base(request),
            emitted.finish_reason if emitted.finish_reason in ENDS_WITH_TOKEN else None,
            scores[emitted.index] if (scores := outcome.logprobs.get(request.id)) else None,
            request.prompt_logprobs if is_first else None,
        )

    def _request(self, message: Submit) -> Request:
        self._arrivals += 1
        return Request(
            arrival_index=self._arrivals,
            id=message.request_id,
            prompt_tokens=len(message.prompt_token_ids),
            token_ids=list(message.prompt_token_ids),
            sampling=message.sampling,
            cache_salt=message.cache_salt,
            tenant=message.tenant,
            weight=message.weight,
            priority=message.priority,
            fork_of=message.fork_of,
            adapter=message.adapter,
        )

    def _prepare(self, request: Request, message: Submit) -> Preparing | None:
        """Begins what the runner and the techniques do for a request before it may be scheduled. None: it may be."""
        work = self.runner.begin(request)
        waits = [wait for technique in self.techniques if (wait := technique.arrived(request, message)) is not None]
        preparing = Preparing(request, work, waits)
        if preparing.is_done and preparing.error is None:
            self.scheduler.add(request)
            return None
        self._preparing.append(preparing)  # the next turn ends it
        return preparing

    def _take_ended(self) -> None:
        """The requests whose end a technique kept back until now."""
        for technique in self.techniques:
            for request, since_ns, now_ns in technique.ended(not self._under_way):
                self.observer.handed_over(request, since_ns, now_ns)
                self._ended.append((request, now_ns))

    def _answer(self) -> None:
        for technique in self.techniques:
            for message in technique.answers():
                self.publish(message)

    def _release(self) -> tuple[list[Request], list[tuple[Request, bool]]]:
        """Requests that may be scheduled now, and those that the runner cannot serve, as `_abort` tells them."""
        released, refused = [], []
        preparing, self._preparing = self._preparing, []
        waiting: set[str] = set()
        for each in preparing:
            request = each.request
            # A fork stays behind the request whose blocks it shares.
            if each.error is None and (not each.is_done or request.fork_of in waiting):
                waiting.add(request.id)
                self._preparing.append(each)
            elif each.error is None:
                each.note()
                self.scheduler.add(request)
                released.append(request)
            else:
                request.is_peer_error = each.is_peer_error
                refused.append((self._end_preparing(request, "error", each.error), True))
        return released, refused

    def _abort(self, request_id: str) -> list[tuple[Request, bool]]:
        """Forgets a request: that one, if it is known, and whether it waited."""
        known = self.scheduler.requests.get(request_id)
        if known is not None:
            waited = known.state is not State.RUNNING
            self.scheduler.abort(known)
            self._cancel(known)
            return [(known, waited)]
        for item in self._preparing:
            if item.request.id == request_id:
                self._preparing.remove(item)
                return [(self._end_preparing(item.request, "abort"), True)]
        return []  # it ended before the abort arrived

    def _end_preparing(self, request: Request, reason: str, error: str | None = None) -> Request:
        request.state, request.finish_reason, request.error = State.FINISHED, reason, error
        self._cancel(request)
        return request

    def _cancel(self, request: Request) -> None:
        self.runner.forget(request.id)
        for technique in self.techniques:
            technique.cancelled(request)
