"""A simulated device and its server: continuous batching on a virtual clock, booked to the accounts as they happen.

One token budget, running requests first, chunked prefill, KV blocks with preemption by recompute, a step time of
`step_ns + token_ns · tokens + context_ns · context`. It shares no code with the engine, so that what it records is an
independent statement of what the accounts mean.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from sojourn.metrics.ledger import Account, new_ledger
from sojourn.metrics.records import ClientRecord, RequestRecord, StepRecord

US, MS, S = 1_000, 1_000_000, 1_000_000_000
STEPS_BEFORE_A_PREDICTION = 20


@dataclass(frozen=True, slots=True)
class Device:
    """What a step and the ways to and from it cost. Times are nanoseconds."""

    step_ns: int = 8 * MS
    token_ns: int = 200 * US
    context_ns: int = 500  # for each token of context that a request of the batch reads
    noise: float = 0.03  # relative spread of the device time
    slowdown: float = 1.0  # of the device from `slow_from` of the requests on; the prediction knows nothing of it
    slow_from: float = 1.0
    stretched_share: float = 0.0  # of the steps, drawn at random, which take `stretch` times as long
    stretch: float = 1.2
    stalled_steps: tuple[int, ...] = ()  # in which the process stands still for `stall_ns`, behind their work
    stall_ns: int = 0
    host_ns: int = 400 * US  # receive, schedule, prepare, launch and commit, not hidden by the device
    sample_ns: int = 100 * US
    encode_ns: int = 500 * US
    chunk_ns: int = 60 * US  # the front's own work for each chunk; the front serves one chunk at a time
    network_ns: int = 200 * US


@dataclass(frozen=True, slots=True)
class Settings:
    """The engine's settings that the simulation knows, under the engine's names."""

    num_kv_blocks: int = 4096
    block_size: int = 16
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_prefill_chunk_tokens: int | None = None
    max_waiting: int = 100_000
    prefix_caching: bool = True
    policy: str = "fcfs"  # or static: nobody is admitted while anybody runs


@dataclass(slots=True)
class Arrival:
    """One request as the client means to send it."""

    request_id: str
    klass: str
    due_ns: int
    prompt_tokens: int
    output_tokens: int
    shared_tokens: int = 0  # of the prompt, alike in all requests of the class
    lag_ns: int = 0


@dataclass(slots=True, eq=False)  # a job equals only itself: comparing fields would dominate the cost of a step
class Job:
    """A request inside the server."""

    arrival: Arrival
    arrived_ns: int
    visible_ns: int
    ledger: list[int] = field(default_factory=new_ledger)
    ttft: list[int] = field(default_factory=new_ledger)
    computed: int = 0
    cached: int = 0
    prefilled: int = 0  # prompt tokens that went through the model, recomputed ones not counted
    recomputed: int = 0
    highest: int = 0  # tokens whose KV was there at any time
    outputs: int = 0
    preemptions: int = 0
    preempted: bool = False
    blocks: int = 0
    since_ns: int = 0  # up to when its time is booked
    first_step: int | None = None
    last_step: int | None = None
    token_ns: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)

    @property
    def known(self) -> int:
        return self.arrival.prompt_tokens + self.outputs

    def book(self, account: Account, until_ns: int) -> None:
        self.ledger[account] += until_ns - self.since_ns
        self.since_ns = until_ns


@dataclass(slots=True)
class Records:
    client: list[ClientRecord] = field(default_factory=list)
    requests: list[RequestRecord] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)


class SimulatedServer:
    """Runs arrivals to their end. `records` then holds what client, server and loop saw."""

    def __init__(self, arrivals: list[Arrival], settings: Settings, device: Device, seed: int, scenario: str):
        self.settings, self.device, self.scenario = settings, device, scenario
        longest = max((a.prompt_tokens + a.output_tokens + a.shared_tokens for a in arrivals), default=0)
        assert longest <= (settings.num_kv_blocks - 1) * settings.block_size, "a request that can never fit"
        self.random = np.random.default_rng(seed)
        self.records = Records()
        self.coming = deque(sorted((self._job(arrival) for arrival in arrivals), key=lambda job: job.visible_ns))
        self.slow_at_ns = int(max(a.due_ns for a in arrivals) * device.slow_from) if arrivals else 0
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.free = settings.num_kv_blocks
        self.shared_ready: dict[str, int] = {}  # class → blocks of its shared prefix that are in the pool
        self.front_free_ns = 0
        self.step = 0

    def run(self) -> Records:
        now = 0
        while self.coming or self.waiting or self.running:
            if not (self.waiting or self.running):
                now = max(now, self.coming[0].visible_ns)
            self._receive(now)
            now = self._run_step(now)
        return self.records

    def _job(self, arrival: Arrival) -> Job:
        arrived = arrival.due_ns + arrival.lag_ns + self.device.network_ns
        job = Job(arrival, arrived, arrived + self.device.encode_ns, since_ns=arrived)
        job.book(Account.TOKEN_ENCODE, job.visible_ns)
        return job

    def _receive(self, now: int) -> None:
        while self.coming and self.coming[0].visible_ns <= now:
            job = self.coming.popleft()
            if len(self.waiting) >= self.settings.max_waiting:
                self._refuse(job)
                continue
            job.book(Account.REQUEST_ADMISSION, now)
            self.waiting.append(job)

    def _refuse(self, job: Job) -> None:
        a = job.arrival
        self.records.client.append(
            ClientRecord(request_id=a.request_id, scenario=self.scenario, due_ns=a.due_ns, status="error",
                         klass=a.klass, sent_ns=a.due_ns + a.lag_ns, error="HTTP 429: the queue is full")
        )  # fmt: skip

    # The plan: {job: new tokens}, running requests first, then the queue in its order.

    def _grow(self, job: Job, tokens: int) -> bool:
        own = job.computed + tokens - job.cached
        need = -(-own // self.settings.block_size) - job.blocks
        if need > self.free:
            return False
        self.free -= max(need, 0)
        job.blocks += max(need, 0)
        return True

    def _preempt(self, job: Job) -> None:
        self.running.remove(job)
        self.free += job.blocks
        job.blocks, job.computed, job.cached = 0, 0, 0
        job.preemptions += 1
        job.preempted = True
        self.waiting.appendleft(job)

    def _plan(self) -> tuple[dict[int, tuple[Job, int]], dict[str, int], list[Job]]:
        budget = self.settings.max_num_batched_tokens
        chunk = self.settings.max_prefill_chunk_tokens or budget
        plan: dict[int, tuple[Job, int]] = {}
        preempted: list[Job] = []
        for job in list(self.running):
            if job not in self.running:
                continue
            tokens = min(job.known - job.computed, budget, chunk)
            while tokens and not self._grow(job, tokens):
                victim = next((j for j in reversed(self.running) if id(j) not in plan), job)
                self._preempt(victim)
                preempted.append(victim)
                tokens = 0 if victim is job else tokens
            if tokens:
                plan[id(job)] = (job, tokens)
                budget -= tokens
        refusals: dict[str, int] = {}
        closed = self.settings.policy == "static" and bool(self.running)
        while self.waiting and not preempted:
            job = self.waiting[0]
            self._look_up_prefix(job)
            tokens = min(job.known - job.computed, budget, chunk)
            fits = self._fits(job)
            reason = (
                "policy" if closed
                else "batch_cap" if len(self.running) >= self.settings.max_num_seqs
                else "token_budget" if budget <= 0
                else "kv_blocks" if not fits
                else None
            )  # fmt: skip
            if reason:
                refusals[reason] = 1
                break
            self._grow(job, tokens)
            self.waiting.popleft()
            self.running.append(job)
            plan[id(job)] = (job, tokens)
            budget -= tokens
        if self.waiting and preempted:
            refusals["kv_blocks"] = 1
        if len(self.waiting) > 1:
            refusals["behind_head"] = len(self.waiting) - 1
        return plan, refusals, preempted

    def _fits(self, job: Job) -> bool:
        own = job.known - job.cached
        return -(-own // self.settings.block_size) <= self.free

    def _look_up_prefix(self, job: Job) -> None:
        ready = self.shared_ready.get(job.arrival.klass, 0)
        if self.settings.prefix_caching and job.computed == 0 and ready:
            job.cached = job.computed = ready * self.settings.block_size

    # The step: what it costs, and whom it is booked to.

    def _run_step(self, begin: int) -> int:
        plan, refusals, preempted = self._plan()
        device, jobs = self.device, list(plan.values())
        tokens = sum(n for _, n in jobs)
        context = sum(job.computed + n for job, n in jobs)
        expected = device.step_ns + device.token_ns * tokens + device.context_ns * context if jobs else 0
        slow = device.slowdown if begin >= self.slow_at_ns and device.slow_from < 1 else 1.0
        if device.stretched_share and self.random.random() < device.stretched_share:
            slow *= device.stretch
        busy = int(expected * slow * max(0.5, self.random.normal(1, device.noise)))
        busy += device.stall_ns if jobs and self.step in device.stalled_steps else 0
        host = device.host_ns
        sample = device.sample_ns if jobs else 0
        end = begin + host + busy + sample
        kinds = [self._kind(job, n) for job, n in jobs]
        own = {"prefill": Account.COMPUTE_PREFILL, "recompute": Account.MEMORY_RECOMPUTE}
        prompt_tokens = sum(n for (_, n), kind in zip(jobs, kinds, strict=True) if kind != "decode")
        for (job, n), kind in zip(jobs, kinds, strict=True):
            waited_behind = int(busy * (prompt_tokens - (n if kind != "decode" else 0)) / tokens)
            if job.preempted:
                job.book(Account.MEMORY_PREEMPTED, begin)
                job.preempted = False
            job.book(Account.COMPUTE_HOST, begin + host)
            job.book(Account.REQUEST_INTERFERENCE, begin + host + waited_behind)
            job.book(own.get(kind, Account.COMPUTE_DECODE), begin + host + busy)
            job.book(Account.TOKEN_SAMPLE, end)
        self._record_step(begin, end, host, busy, sample, expected, jobs, kinds, refusals, preempted)
        self._book_waits(refusals, plan, end)
        for job, n in jobs:
            self._commit(job, n, end)
        self.step += 1
        return end

    def _kind(self, job: Job, tokens: int) -> str:
        if job.computed < job.highest:
            return "recompute"
        return "decode" if job.computed >= job.arrival.prompt_tokens and tokens == 1 else "prefill"

    def _book_waits(self, refusals: dict[str, int], plan: dict, end: int) -> None:
        for place, job in enumerate(self.waiting):
            if job.preempted:
                job.book(Account.MEMORY_PREEMPTED, end)
            else:
                blocked = place == 0 and "kv_blocks" in refusals
                job.book(Account.MEMORY_BLOCKED if blocked else Account.REQUEST_QUEUE, end)
        for job in self.running:
            if id(job) not in plan:
                job.book(Account.REQUEST_INTERFERENCE, end)

    def _commit(self, job: Job, tokens: int, end: int) -> None:
        seen_before = min(max(job.highest - job.computed, 0), tokens)
        job.recomputed += seen_before
        job.prefilled += max(min(job.computed + tokens, job.arrival.prompt_tokens) - job.computed - seen_before, 0)
        job.computed += tokens
        job.highest = max(job.highest, job.computed)
        job.first_step = self.step if job.first_step is None else job.first_step
        job.last_step = self.step
        if job.computed < job.known:
            return
        job.outputs += 1
        job.token_ns.append(end)
        begin = max(self.front_free_ns, end)
        self.front_free_ns = begin + self.device.chunk_ns
        job.written.append(self.front_free_ns)
        if job.outputs == 1:
            job.ttft = self._with_front(job, end)
            self._publish_prefix(job)
        if job.outputs == job.arrival.output_tokens:
            self._finish(job, end)

    def _with_front(self, job: Job, emitted: int) -> list[int]:
        """The ledger up to now, and the way of the newest chunk through the front."""
        ledger = list(job.ledger)
        decode = self.device.chunk_ns // 2
        ledger[Account.TOKEN_DECODE] += decode
        ledger[Account.REQUEST_STREAM] += job.written[-1] - emitted - decode
        return ledger

    def _publish_prefix(self, job: Job) -> None:
        blocks = job.arrival.shared_tokens // self.settings.block_size
        if self.settings.prefix_caching and blocks and job.arrival.klass not in self.shared_ready:
            self.shared_ready[job.arrival.klass] = blocks
            job.blocks -= min(blocks, job.blocks)  # they stay in the pool, for all

    def _finish(self, job: Job, end: int) -> None:
        a = job.arrival
        self.running.remove(job)
        self.free += job.blocks
        read = [written + self.device.network_ns for written in job.written]
        self.records.requests.append(
            RequestRecord(
                request_id=a.request_id, arrived_ns=job.arrived_ns, finished_ns=end, klass=a.klass,
                finish_reason="length", prompt_tokens=a.prompt_tokens, cached_tokens=a.prompt_tokens - job.prefilled,
                computed_tokens=job.prefilled + a.output_tokens - 1, recomputed_tokens=job.recomputed,
                output_tokens=a.output_tokens, preemptions=job.preemptions, first_step=job.first_step,
                last_step=job.last_step, token_ns=job.token_ns, written_ns=job.written[-1],
                first_written_ns=job.written[0], ledger=self._with_front(job, end), ttft=job.ttft,
            )
        )  # fmt: skip
        self.records.client.append(
            ClientRecord(
                request_id=a.request_id, scenario=self.scenario, due_ns=a.due_ns, status="ok", klass=a.klass,
                sent_ns=a.due_ns + a.lag_ns, first_token_ns=read[0], last_byte_ns=read[-1],
                prompt_tokens=a.prompt_tokens, output_tokens=a.output_tokens,
                cached_tokens=a.prompt_tokens - job.prefilled, chunk_ns=read, chunk_tokens=[1] * len(read),
            )
        )  # fmt: skip

    def _record_step(self, begin, end, host, busy, sample, expected, jobs, kinds, refusals, preempted) -> None:
        shared = sum(self.shared_ready.values())
        reusable = 0 if self.running else shared
        active = self.settings.num_kv_blocks - self.free - reusable
        # receive, schedule, prepare, launch, wait, sample, commit, publish: the host's share in fixed parts
        parts = [host // 8, host // 4, host // 4, host // 8, busy, sample, host // 8]
        parts.append(end - begin - sum(parts))
        tokens = sum(n for _, n in jobs)
        context = sum(job.computed + n for job, n in jobs)
        self.records.steps.append(
            StepRecord.of(
                step=self.step, begin_ns=begin, end_ns=end, stages=parts, device_ns=busy,
                request_ids=[job.arrival.request_id for job, _ in jobs], new_tokens=[n for _, n in jobs],
                past_tokens=[job.computed for job, _ in jobs], kinds=kinds, padding_tokens=0, graph="eager",
                budget=self.settings.max_num_batched_tokens, waiting=len(self.waiting), refusals=refusals,
                preempted_ids=[job.arrival.request_id for job in preempted],
                preempted_for=[jobs[0][0].arrival.request_id for _ in preempted],
                preempted_tokens=[job.arrival.prompt_tokens for job in preempted], evicted_blocks=0,
                blocks_free=self.free, blocks_active=active, blocks_reusable=reusable,
                flops=6_000_000 * tokens,
                bytes=12_000_000 + 4_096 * context,
                predicted_ns=expected if self.step >= STEPS_BEFORE_A_PREDICTION else None, planned_ns=begin,
                device_end_ns=begin + host + busy, sampling_ns=0,
            )
        )  # fmt: skip
