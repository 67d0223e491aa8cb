"""The loop: receive → schedule → execute → commit → publish, and then what no token waits for.

Pure of sockets; the clock and the runner are given.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

from engine.config import EngineConfig
from engine.memory.block_pool import BlockCounts, BlockPool
from engine.memory.journal import Journal, NoJournal
from engine.memory.shadow.journal import ShadowJournal
from engine.messages import Abort, Ended, Output, Outputs, Submit, ToldSteps
from engine.request.plan import LaunchedStep, Preemption, Preparation, Runner, StepOutcome
from engine.request.policies import make_policy
from engine.request.request import Request, State
from engine.request.scheduler import Emitted, Scheduler
from engine.telemetry.observer import Books

TOLD_BY_TOKEN = ("stop", "length")  # ends that a last token tells; of an error the front needs its sentence


class Engine:
    """Runs steps while there is work. `publish` is handed what each step gave.

    With `overlap` a step is planned and launched before the one before it is read: the host works while the device
    does. Without, each step is read before the next one is planned.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        books: Books,
        publish: Callable[[Outputs], None],
        *,
        first_step: int = 0,
        overlap: bool = False,
        clock: Callable[[], int] = time.monotonic_ns,
    ):
        self.scheduler = scheduler
        self.runner = runner
        self.books = books
        self.publish = publish
        self.clock = clock
        self.step_number = first_step
        self.overlap = overlap
        self._orders = 0
        self._flights: deque[LaunchedStep] = deque()
        self._admitted: list[Request] = []  # and not published yet
        self._gave_way: list[Preemption] = []  # in a plan that nothing was launched for
        self._held: list[tuple[Request, Preparation]] = []  # not scheduled before the runner is ready for them
        self._ended: list[Ended] = []
        self._last_turn: tuple[int, int] | None = None
        self._step_ended_ns = 0  # the last step that was committed
        self._begin_ns = self._received_ns = 0

    @property
    def has_work(self) -> bool:
        return bool(self._flights) or self.scheduler.has_work

    @property
    def is_preparing(self) -> bool:
        """Requests are held until the runner is ready for them; `receive` sees whether it is."""
        return bool(self._held)

    def receive(self, messages: Sequence[Submit | Abort], begin_ns: int) -> None:
        """Takes in what the front sent. `begin_ns` is when that began: the end of the last step, if without a pause."""
        released, gave_up = self._release()
        arrived: list[tuple[Request, int, bool]] = []
        for message in messages:
            if isinstance(message, Submit):
                request = self._request(message)
                preparation = self.runner.begin(request)
                if preparation is None:
                    self.scheduler.add(request)
                else:
                    self._held.append((request, preparation))
                arrived.append((request, message.encoded_ns, preparation is not None))
            else:
                gave_up += self._abort(message.request_id)
        self._begin_ns, now_ns = begin_ns, self.clock()
        self._received_ns = now_ns
        for request, encoded_ns, held in arrived:
            self.books.received(request, encoded_ns, now_ns, self._last_turn, held=held)
        for request in released:
            self.books.released(request, now_ns)
        for request, waited in gave_up:
            self.books.gave_up(request, waited, now_ns)
            self._end(request, now_ns)

    def step(self) -> int:
        """One turn, after `receive`: plans and launches a step, reads one, or both. Returns when it ended."""
        begin_ns = self._begin_ns
        self.scheduler.journal.now_ns = begin_ns
        if self._last_turn is None or self._last_turn[1] < begin_ns:
            self.books.resumed(begin_ns, self._last_turn, bool(self._flights))
        readings = [begin_ns, self._received_ns]
        launched = self._launch_next(readings)
        if self._flights and not (launched and self.overlap and len(self._flights) == 1):
            self._collect_next(readings)
            end_ns = self._step_ended_ns = self.clock()
        else:
            self.books.passed(readings)
            end_ns = readings[-1]
        self._last_turn = (begin_ns, end_ns)
        return end_ns

    def _launch_next(self, readings: list[int]) -> bool:
        """Plans a step and launches it, unless that has to wait for the one under way or would compute nothing."""
        if self._flights and self._flights[-1].plan.needs_commit:
            readings += [readings[-1]] * 3
            return False
        plan = self.scheduler.schedule()
        if self._held:
            plan.refusals["grammar"] = len(self._held)
        planned_ns = self.clock()
        self.books.planned(plan, readings[0], planned_ns)
        self._admitted += plan.admitted
        if not plan.scheduled:  # the last tokens of all who run are under way
            self._gave_way += plan.preempted
            readings += [planned_ns] * 3
            return False
        if self._gave_way:
            plan.preempted, self._gave_way = self._gave_way + plan.preempted, []
        handle = self.runner.launch(plan)
        self._flights.append(handle)
        readings += [planned_ns, handle.prepared_ns, handle.launched_ns]
        return True

    def _collect_next(self, readings: list[int]) -> None:
        """Reads the oldest step under way, commits it and publishes what it gave."""
        flight = self._flights.popleft()
        plan, outcome = flight.plan, self.runner.collect(flight)
        running, changes = self.scheduler.running, self.scheduler.changes
        # Who could not be planned (a token budget below the running) changes nothing: so their number is compared, too.
        is_steady = plan.changes == changes == self.books.steady_since and len(plan.scheduled) == len(running)
        if not is_steady:
            self.books.collected(plan, running, changes)
        emitted = self.scheduler.commit(plan, outcome, self.step_number)
        readings += [outcome.waited_ns, outcome.sampled_ns]
        committed_ns = self.clock()
        readings.append(committed_ns)
        tokens = [item for item in emitted if item.token_id is not None]
        blocks = self.scheduler.pool.counts()
        turned = (self.step_number, len(tokens), blocks, self._step_ended_ns)
        steps = self.books.committed(plan, outcome, readings, turned, is_steady)
        self._step_ended_ns = committed_ns  # for as long as its turn goes on, and if that is broken off
        self.step_number += 1
        outputs = [self._output(item, outcome) for item in tokens]
        ended = [item for item in emitted if item.finish_reason]
        silent = [item for item in ended if item.token_id is None or item.finish_reason not in TOLD_BY_TOKEN]
        self._finish(silent, committed_ns)
        self._tell(committed_ns, outputs, blocks, steps)
        self._finish([item for item in ended if item not in silent], committed_ns)  # nobody's token waits for that
        if self.scheduler.journal.is_due:
            self.scheduler.journal.settle_some()

    def tell_all(self) -> None:
        """Nothing is left to compute, or nothing will be any more: tells what no later step would."""
        if not self.has_work:  # else a fault brings us here, which may be the journal's
            self.scheduler.journal.settle()
        if self._ended or self.books.untold_steps:
            self._tell(self.clock(), [], self.scheduler.pool.counts(), self.books.rest(self._step_ended_ns))

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

    def _release(self) -> tuple[list[Request], list[tuple[Request, bool]]]:
        """Requests that the runner is ready for now, and those that it cannot serve, as `_abort` tells them."""
        released, refused = [], []
        held, self._held = self._held, []
        waiting: set[str] = set()
        for request, preparation in held:
            # A fork stays behind the request whose blocks it shares.
            if not preparation.is_done or request.fork_of in waiting:
                waiting.add(request.id)
                self._held.append((request, preparation))
            elif preparation.error is None:
                self.scheduler.add(request)
                released.append(request)
            else:
                refused.append((self._end_held(request, "error", preparation.error), True))
        return released, refused

    def _abort(self, request_id: str) -> list[tuple[Request, bool]]:
        """Forgets a request: that one, if it is known, and whether it waited."""
        known = self.scheduler.requests.get(request_id)
        if known is not None:
            waited = known.state is not State.RUNNING
            self.scheduler.abort(known)
            self.runner.forget(request_id)
            return [(known, waited)]
        for item in self._held:
            if item[0].id == request_id:
                self._held.remove(item)
                return [(self._end_held(item[0], "abort"), True)]
        return []  # it ended before the abort arrived

    def _finish(self, ended: list[Emitted], committed_ns: int) -> None:
        """A step that was committed then ended them."""
        for item in ended:
            self.runner.forget(item.request.id)
            self.books.ended(item.request)
            self._end(item.request, committed_ns)

    def _end(self, request: Request, booked_ns: int) -> None:
        """It is told with the next message: what its record needs."""
        self.scheduler.journal.settle_for(request)
        self._ended.append(_ended(request, booked_ns))

    def _end_held(self, request: Request, reason: str, error: str | None = None) -> Request:
        request.state, request.finish_reason, request.error = State.FINISHED, reason, error
        self.runner.forget(request.id)
        return request

    def _tell(self, now_ns: int, outputs: list[Output], blocks: BlockCounts, steps: ToldSteps | None) -> None:
        self.publish(
            Outputs(
                committed_ns=now_ns,
                reading=self.books.clock.reading,
                admitted=[(request.id, request.cached_tokens) for request in self._admitted],
                outputs=outputs,
                ended=self._ended,
                steps=steps,
                untold_steps=self.books.untold_steps,
                next_step=self.step_number,
                blocks=blocks,
                waiting=self.scheduler.num_waiting,
                running=len(self.scheduler.running),
            )
        )
        self._ended, self._admitted = [], []

    def _output(self, emitted: Emitted, outcome: StepOutcome) -> Output:
        request = emitted.request
        first = request.output_tokens == 1 and request.sampling.prompt_logprobs is not None
        return Output(
            request.id,
            emitted.token_id,
            self.books.told(request) if request.untold else None,
            emitted.finish_reason if emitted.finish_reason in TOLD_BY_TOKEN else None,
            outcome.logprobs.get(request.id),
            request.prompt_logprobs if first else None,
        )


def make_scheduler(config: EngineConfig, num_kv_blocks: int) -> Scheduler:
    """The scheduler that an EngineConfig asks for, over a pool of `num_kv_blocks`."""
    pool = BlockPool(num_kv_blocks, config.block_size, config.prefix_caching)
    return Scheduler(
        pool,
        make_policy(config, pool),
        make_journal(config, pool),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_prefill_chunk_tokens=config.max_prefill_chunk_tokens,
        max_long_prefills=config.max_long_prefills,
        long_prefill_tokens=config.long_prefill_tokens,
    )


def make_journal(config: EngineConfig, pool: BlockPool) -> Journal:
    """What watches the blocks, as the setting `telemetry` asks for it."""
    return ShadowJournal(pool) if config.telemetry == "full" else NoJournal()


def _ended(request: Request, booked_ns: int) -> Ended:
    return Ended(
        request_id=request.id,
        reason=request.finish_reason or "abort",
        cached_tokens=request.cached_tokens,
        computed_tokens=request.computed_tokens,
        recomputed_tokens=request.recomputed_tokens,
        preemptions=request.preemptions,
        first_step=request.first_step,
        last_step=request.last_step,
        queued_ns=request.queued_ns,
        scheduled_ns=request.scheduled_ns,
        booked_ns=booked_ns,
        ledger=request.ledger,
        waits=request.waits,
        error=request.error,
        prefix=request.prefix_report,
    )
