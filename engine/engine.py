"""The loop: receive → schedule → execute → commit → publish. Pure of sockets; the clock and the runner are given."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from engine.config import EngineConfig
from engine.memory.block_pool import BlockPool
from engine.memory.journal import ShadowJournal
from engine.messages import Abort, Ended, Output, Outputs, Submit
from engine.request.accounting import Accountant, Alive, alive
from engine.request.plan import Launched, Preparation, Runner, StepOutcome, StepPlan
from engine.request.policies import make_policy
from engine.request.request import Request, State
from engine.request.scheduler import Emitted, Scheduler
from metrics.costmodel import ModelShape, StepTimeModel, step_bytes
from metrics.ledger import Account
from metrics.records import STAGES, StepRecord


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was launched and not read yet."""

    plan: StepPlan
    handle: Launched


class Engine:
    """Runs steps while there is work. `publish` is handed what each step gave.

    With `overlap` a step is planned and launched before the one before it is read: the host works while the device
    does. Without, each step is read before the next one is planned.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        shape: ModelShape,
        publish: Callable[[Outputs], None],
        *,
        first_step: int = 0,
        overlap: bool = False,
        clock: Callable[[], int] = time.monotonic_ns,
    ):
        self.scheduler = scheduler
        self.runner = runner
        self.shape = shape
        self.publish = publish
        self.clock = clock
        self.step_number = first_step
        self.overlap = overlap
        self.step_time = StepTimeModel()
        self.accountant = Accountant(shape)
        self._orders = 0
        self._flights: deque[Flight] = deque()
        self._arrived: list[tuple[Request, int]] = []  # and when
        self._admitted: list[Request] = []  # and not published yet
        self._gave_way: list[Request] = []  # in a plan that nothing was launched for
        self._held: list[tuple[Request, Submit, Preparation]] = []  # not scheduled before the runner is ready for them
        self._ended: list[Ended] = []
        self._records: list[StepRecord] = []  # of steps that are over and not yet published
        self._last_turn: tuple[int, int] | None = None
        self._begin_ns = self._received_ns = 0
        self._record_begin_ns: int | None = None  # when the first turn began that no record holds
        self._stages = [0] * len(STAGES)  # of those turns
        self._idle_since_ns = 0  # the device, unless a step is under way
        self._evicted = 0

    @property
    def has_work(self) -> bool:
        return bool(self._flights) or self.scheduler.has_work

    @property
    def is_preparing(self) -> bool:
        """Requests are held until the runner is ready for them; `receive` sees whether it is."""
        return bool(self._held)

    def receive(self, messages: Sequence[Submit | Abort], begin_ns: int) -> None:
        """Takes in what the front sent. `begin_ns` is when that began: the end of the last step, if without a pause."""
        arrived = self._released()
        for message in messages:
            if isinstance(message, Submit):
                request = self._request(message)
                preparation = self.runner.begin(request)
                if preparation is None:
                    self.scheduler.add(request)
                    arrived.append((request, message.encoded_ns))
                else:
                    self._held.append((request, message, preparation))
            else:
                self._abort(message.request_id, {request.order for request, _ in arrived})
        self._begin_ns, self._received_ns = begin_ns, self.clock()
        for request, ready_ns in arrived:
            if request.state is not State.FINISHED:
                self.accountant.visible(request, ready_ns, self._received_ns, self._last_turn)
                self._arrived.append((request, self._received_ns))

    def step(self) -> int:
        """One turn, after `receive`: plans and launches a step, reads one, or both. Returns when it ended."""
        begin_ns = self._begin_ns
        self.scheduler.journal.now_ns = begin_ns
        if self._last_turn is not None:
            self.accountant.paused(self._last_turn[1], begin_ns)
        if not self._flights and (self._last_turn is None or self._last_turn[1] < begin_ns):
            self._idle_since_ns = begin_ns  # the loop was asleep
        if self._record_begin_ns is None:
            self._record_begin_ns = begin_ns
        readings = [begin_ns, self._received_ns]
        launched = self._launch_next(readings)
        if self._flights and not (launched and self.overlap and len(self._flights) == 1):
            end_ns = self._collect_next(readings)
        else:
            end_ns = readings[-1]
            self._pass_stages(readings)
        self._last_turn = (begin_ns, end_ns)
        return end_ns

    def _launch_next(self, readings: list[int]) -> bool:
        """Plans a step and launches it, unless that has to wait for the one under way or would compute nothing."""
        if self._flights and self._flights[-1].plan.needs_commit:
            readings += [readings[-1]] * 3
            return False
        plan = self.scheduler.schedule()
        planned_ns = self.clock()
        self.accountant.planned(plan, self._arrived, readings[0], planned_ns)
        self._arrived.clear()
        self._admitted += plan.admitted
        if not plan.scheduled:  # the last tokens of all who run are under way
            self._gave_way += plan.preempted
            readings += [planned_ns] * 3
            return False
        if self._gave_way:
            plan.preempted, self._gave_way = self._gave_way + plan.preempted, []
        handle = self.runner.launch(plan)
        self._flights.append(Flight(plan, handle))
        readings += [planned_ns, handle.prepared_ns, handle.launched_ns]
        return True

    def _collect_next(self, readings: list[int]) -> int:
        """Reads the oldest step under way, commits it and publishes what it gave; returns when that was done."""
        flight = self._flights.popleft()
        plan, outcome = flight.plan, self.runner.collect(flight.handle)
        present = alive(plan, self.scheduler.running)
        emitted = self.scheduler.commit(plan, outcome, self.step_number)
        committed_ns = self.clock()
        flops = self.accountant.executed(plan.scheduled, present, outcome, committed_ns)
        self._publish(committed_ns, emitted, outcome)
        readings += [outcome.waited_ns, outcome.sampled_ns, committed_ns]
        return self._record(plan, outcome, present, readings, flops)

    def idle(self) -> None:
        """Nothing is left to compute: reports what no later step would."""
        if self._records or self._ended:
            self._publish(self.clock(), [], None)

    def _request(self, message: Submit) -> Request:
        self._orders += 1
        request = Request(
            order=self._orders,
            id=message.request_id,
            prompt_tokens=len(message.prompt_token_ids),
            token_ids=list(message.prompt_token_ids),
            sampling=message.sampling,
            cache_salt=message.cache_salt,
            tenant=message.tenant,
            priority=message.priority,
            fork_of=message.fork_of,
        )
        return request

    def _released(self) -> list[tuple[Request, int]]:
        """Requests that the runner is ready for now, and since when; those that it cannot serve end."""
        released = []
        held, self._held = self._held, []
        waiting: set[str] = set()
        for request, message, preparation in held:
            # A fork stays behind the request whose blocks it shares.
            if not preparation.is_done or message.fork_of in waiting:
                waiting.add(request.id)
                self._held.append((request, message, preparation))
                continue
            request.ledger[Account.REQUEST_ADMISSION] += preparation.ready_ns - message.encoded_ns
            if preparation.error is None:
                self.scheduler.add(request)
                released.append((request, preparation.ready_ns))
            else:
                self._end_held(request, "error", preparation.error)
        return released

    def _end_held(self, request: Request, reason: str, error: str | None = None) -> None:
        request.state, request.finish_reason, request.error = State.FINISHED, reason, error
        self.runner.forget(request.id)
        self._ended.append(_ended(request))

    def _abort_held(self, request_id: str) -> None:
        for item in self._held:
            request, message, _ = item
            if request.id == request_id:
                self._held.remove(item)
                request.ledger[Account.REQUEST_ADMISSION] += self.clock() - message.encoded_ns
                self._end_held(request, "abort")
                return

    def _abort(self, request_id: str, unseen: set[int]) -> None:
        known = self.scheduler.requests.get(request_id)
        if known is None:  # the runner is not ready for it, or it ended before the abort arrived
            return self._abort_held(request_id)
        waited = known.state is not State.RUNNING
        self.scheduler.abort(known)
        self.runner.forget(request_id)
        if known.order not in unseen:  # else it was submitted and aborted within one receive
            self.accountant.aborted(known, waited, self.clock())
        self._arrived = [item for item in self._arrived if item[0] is not known]
        self._ended.append(_ended(known))

    def _publish(self, now_ns: int, emitted: list[Emitted], outcome: StepOutcome | None) -> None:
        outputs = [_output(item, outcome) for item in emitted if item.token_id is not None]
        for item in emitted:
            if item.finish_reason:
                self.runner.forget(item.request.id)
                self._ended.append(_ended(item.request))
        counts = self.scheduler.pool.counts()
        self.publish(
            Outputs(
                committed_ns=now_ns,
                admitted=[(request.id, request.cached_tokens) for request in self._admitted],
                outputs=outputs,
                ended=self._ended,
                records=self._records,
                blocks=(counts.free, counts.active, counts.reusable, counts.pinned),
                waiting=self.scheduler.num_waiting,
                running=len(self.scheduler.running),
            )
        )
        self._ended, self._records, self._admitted = [], [], []

    def _pass_stages(self, readings: list[int]) -> None:
        """A turn's stages count for the next step that is recorded."""
        for index, (earlier, later) in enumerate(pairwise(readings)):
            self._stages[index] += later - earlier

    def _record(self, plan: StepPlan, outcome: StepOutcome, present: Alive, readings: list[int], flops: int) -> int:
        """Closes the books of a step, whose record travels with the next message; returns when it ended."""
        new_tokens = [item.new_tokens for item in plan.scheduled]
        past_tokens = [item.past_tokens for item in plan.scheduled]
        predicted_ns = self.step_time.observe(new_tokens, past_tokens, outcome.device_ns)
        counts = self.scheduler.pool.counts()
        evicted = self.scheduler.pool.evicted_blocks
        times = self.scheduler.journal.take_times()
        end_ns = self.clock()
        self._pass_stages([*readings, end_ns])
        self._records.append(
            StepRecord(
                step=self.step_number,
                begin_ns=self._record_begin_ns,
                end_ns=end_ns,
                stages=self._stages,
                device_ns=outcome.device_ns,
                request_ids=[item.request.id for item in plan.scheduled],
                new_tokens=new_tokens,
                past_tokens=past_tokens,
                kinds=[item.kind for item in plan.scheduled],
                padding_tokens=outcome.padding_tokens,
                graph=outcome.graph,
                budget=plan.budget,
                waiting=plan.num_waiting,
                refusals=dict(plan.refusals),
                preempted_ids=[request.id for request in plan.preempted],
                evicted_blocks=evicted - self._evicted,
                blocks_free=counts.free,
                blocks_active=counts.active,
                blocks_reusable=counts.reusable,
                blocks_pinned=counts.pinned,
                flops=flops,
                bytes=step_bytes(self.shape, new_tokens, past_tokens),
                predicted_ns=predicted_ns,
                gap_ns=outcome.device_begin_ns - self._idle_since_ns,
                overrun_tokens=present.num_overrun,
                slots_written=self.scheduler.pool.slots_written,
                reuse_gap_ns=times.reuse_gap_ns,
                reuse_distance_blocks=times.reuse_distance_blocks,
                evicted_age_ns=times.evicted_age_ns,
                evicted_idle_ns=times.evicted_idle_ns,
                forgotten_blocks=times.forgotten_blocks,
            )
        )
        self._evicted = evicted
        self._stages, self._record_begin_ns = [0] * len(STAGES), None
        self._idle_since_ns = outcome.device_end_ns
        self.step_number += 1
        return end_ns


def make_scheduler(config: EngineConfig, num_kv_blocks: int) -> Scheduler:
    """The scheduler that an EngineConfig asks for, over a pool of `num_kv_blocks`."""
    pool = BlockPool(num_kv_blocks, config.block_size, config.prefix_caching)
    return Scheduler(
        pool,
        make_policy(config, pool),
        ShadowJournal(pool),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_prefill_chunk_tokens=config.max_prefill_chunk_tokens,
        max_long_prefills=config.max_long_prefills,
        long_prefill_tokens=config.long_prefill_tokens,
    )


def _output(emitted: Emitted, outcome: StepOutcome) -> Output:
    request = emitted.request
    first = request.output_tokens == 1 and request.sampling.prompt_logprobs is not None
    return Output(
        request.id,
        emitted.token_id,
        request.ledger,
        outcome.logprobs.get(request.id),
        request.prompt_logprobs if first else None,
    )


def _ended(request: Request) -> Ended:
    return Ended(
        request_id=request.id,
        reason=request.finish_reason or "abort",
        cached_tokens=request.cached_tokens,
        computed_tokens=request.computed_tokens,
        recomputed_tokens=request.recomputed_tokens,
        preemptions=request.preemptions,
        first_step=request.first_step,
        last_step=request.last_step,
        ledger=request.ledger,
        error=request.error,
        prefix=request.prefix_report,
    )
