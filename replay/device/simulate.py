"""A load on a server that nobody has: the engine's own scheduler on the step times of a device estimate."""

import gc
import heapq
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import ValidationError

from sojourn.engine.config import EngineConfig, complaint
from sojourn.engine.messages import Ended, Submit
from sojourn.engine.request.request import State
from sojourn.engine.sampling import SamplingParams
from sojourn.metrics.errors import ReplayError
from sojourn.metrics.time_limit import TimeLimit
from sojourn.replay.device.composition import SERVING
from sojourn.replay.device.estimate import DeviceEstimate
from sojourn.replay.device.turns import EstimatedTurns, WholePrompts
from sojourn.replay.outcome import Answers
from sojourn.replay.replica import Replica, make_replica

BLOCK_SIZE = 16
# Settings of EngineConfig that a simulation honours: those of the scheduler and of the pool's size and use.
SIMULATED = (
    "max_num_seqs", "max_num_batched_tokens", "max_prefill_chunk_tokens", "max_waiting", "max_long_prefills",
    "long_prefill_tokens", "policy", "priority_ageing", "shortest_ageing", "fair_output_weight", "prefill_patience",
    "prefix_caching", "block_size", "num_kv_blocks", "eviction_policy",
)  # fmt: skip
TURNS_A_CHECK = 256  # of the time limit


@dataclass(frozen=True, slots=True)
class Load:
    """Requests in order, as arrays [requests]. An open loop has their moments, a closed one its concurrency: each end
    sends the next request, after its pause. A request that `follows` another one, by place, is due `pause_ns` after
    that has ended."""

    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    due_ns: np.ndarray | None = None
    concurrency: int | None = None
    ramp_ns: float = 0.0  # over which a closed loop spreads its first requests
    follows: np.ndarray | None = None  # -1: none, and it comes by itself
    pause_ns: np.ndarray | None = None
    hashes: Callable[[int], list[bytes]] | None = None  # of all blocks of BLOCK_SIZE tokens; None: nothing is shared

    def __post_init__(self) -> None:
        assert (self.due_ns is None) != (self.concurrency is None), "a load is open or closed"


@dataclass(frozen=True, slots=True)
class Simulated:
    """What one simulation showed."""

    answers: Answers  # of all requests, in order
    device_ns: float  # that the device computed
    span_ns: float  # from the first moment until the last answer
    steps: int
    preemptions: int
    most_running: int
    cached_tokens: int


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raises ReplayError for a setting that a simulation does not honour, and for a value that the engine refuses."""
    for name in settings:
        if name in EngineConfig.model_fields and name not in SIMULATED:
            raise ReplayError(f"{name} changes nothing of a simulated server; settings that do: {', '.join(SIMULATED)}")
    try:
        EngineConfig.model_validate({"model": "tiny-model", **settings})
    except ValidationError as error:
        raise ReplayError(complaint(error)) from None


def server_config(estimate: DeviceEstimate, **settings: Any) -> EngineConfig:
    """The settings of a server of this estimate's backend as it is started without options; `settings` are of
    EngineConfig. Raises ReplayError where the pool holds nothing, or a setting is refused."""
    check_settings(settings)
    if estimate.composition == "whole-prompts" and settings.get("max_num_batched_tokens") == "auto":
        raise ReplayError("max_num_batched_tokens=auto is of servers that divide prompts; give a number")
    serving = SERVING[estimate.deployment.backend]
    size = settings.get("block_size", BLOCK_SIZE)
    if estimate.kv_tokens < size:
        raise ReplayError(f"{estimate.deployment.model} leaves no memory for keys and values")
    defaults = {
        "block_size": size, "num_kv_blocks": estimate.kv_tokens // size, "max_num_seqs": serving.sequences,
        "max_num_batched_tokens": serving.step_tokens, "max_waiting": 1_000_000, "telemetry": "off",
        "policy": "prefill-first" if estimate.composition == "prefill-first" else "fcfs",
    }  # fmt: skip
    return EngineConfig(model=estimate.deployment.model, **{**defaults, **settings})


def simulate(
    estimate: DeviceEstimate, load: Load, config: EngineConfig | None = None, limit: TimeLimit | None = None
) -> Simulated:
    """Answers of a server with these settings, by default its own. Raises OutsideTables, ReplayError, OutOfTime."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return _Simulation(estimate, load, config or server_config(estimate)).run(limit)
    finally:
        if collects:
            gc.enable()


@dataclass(slots=True)
class _Request:
    due_ns: float
    first_ns: float = math.nan
    last_ns: float = math.nan


@dataclass(slots=True)
class _Counts:
    cached_tokens: int = 0
    most_running: int = 0
    open: list[tuple[float, int]] = field(default_factory=list)  # moments and requests to come


class _Simulation:
    """Owns the clients of one simulation and its replica."""

    def __init__(self, estimate: DeviceEstimate, load: Load, config: EngineConfig) -> None:
        self._load, self._counts = load, _Counts()
        self._prompts, self._outputs = load.prompt_tokens.tolist(), load.output_tokens.tolist()
        self._requests = [_Request(math.nan) for _ in self._prompts]
        follows = [-1] * len(self._prompts) if load.follows is None else load.follows.tolist()
        self._following = {before: place for place, before in enumerate(follows) if before >= 0}
        self._heads = deque(place for place, before in enumerate(follows) if before < 0)
        self._queue: deque[int] = deque()  # requests as they came, from the first that may still wait on
        self._turns = EstimatedTurns(estimate)
        config = self._sized(config)
        longest = int((load.prompt_tokens + load.output_tokens).max())
        self._unshared = [bytes(16)] * (
            longest // config.block_size + 1
        )  # nobody looks for them, and hashing takes long
        budget = None
        if estimate.composition == "whole-prompts":
            assert isinstance(config.max_num_batched_tokens, int), "an estimate's budget is a number"
            budget = WholePrompts(config.max_num_batched_tokens, self._waiting)
        self._replica: Replica = make_replica(
            config, self._turns, self, overlap=False, budget=budget, steady=self._turns
        )

    def run(self, limit: TimeLimit | None) -> Simulated:
        self._begin()
        counts, replica, turns = self._counts, self._replica, 0
        while True:
            turns += 1
            if limit is not None and turns % TURNS_A_CHECK == 0:
                limit.check()
            if counts.open and counts.open[0][0] <= replica.cutoff_ns:
                self._arrive(*heapq.heappop(counts.open))
            elif replica.cutoff_ns < math.inf:
                replica.turn()
                counts.most_running = max(counts.most_running, len(replica.scheduler.running))
            else:
                return self._simulated()

    def hashes_of(self, request_id: str) -> list[bytes] | None:
        return self._unshared if self._load.hashes is None else self._load.hashes(int(request_id))

    def first_token(self, request_id: str, now_ns: float) -> None:
        self._requests[int(request_id)].first_ns = now_ns

    def ended(self, ended: Ended, now_ns: float) -> None:
        self._requests[int(ended.request_id)].last_ns = now_ns
        self._counts.cached_tokens += ended.cached_tokens
        after = self._following.get(int(ended.request_id))
        if after is None and self._load.concurrency is not None and self._heads:
            after = self._heads.popleft()
        if after is not None:
            self._send(after, now_ns + self._pause_ns(after))

    def _pause_ns(self, number: int) -> float:
        return 0.0 if self._load.pause_ns is None else float(self._load.pause_ns[number])

    def _begin(self) -> None:
        load = self._load
        if load.due_ns is not None:
            for number in self._heads:
                self._send(number, float(load.due_ns[number]))
        else:
            slots = min(load.concurrency or 1, len(self._heads))
            for slot in range(slots):
                number = self._heads.popleft()
                self._send(number, load.ramp_ns * slot / slots + self._pause_ns(number))

    def _send(self, number: int, due_ns: float) -> None:
        heapq.heappush(self._counts.open, (due_ns, number))
        self._requests[number].due_ns = due_ns

    def _arrive(self, now_ns: float, number: int) -> None:
        sampling = SamplingParams(max_tokens=max(1, self._outputs[number]), ignore_eos=True)
        message = Submit(str(number), [0] * self._prompts[number], sampling, encoded_ns=round(now_ns))
        self._queue.append(number)
        self._replica.submit(message, now_ns)

    def _waiting(self) -> Sequence[int]:
        """Prompt tokens of the requests that wait, in order of their arrival."""
        known, queue = self._replica.scheduler.requests, self._queue

        def waits(number: int) -> bool:
            request = known.get(str(number))
            return request is not None and request.state is State.WAITING

        while queue and not waits(queue[0]):
            queue.popleft()
        return [self._prompts[number] for number in queue if waits(number)]

    def _sized(self, config: EngineConfig) -> EngineConfig:
        """With no more blocks than the load can fill: a pool of millions takes long to make. Raises ReplayError."""
        load, size = self._load, config.block_size
        assert config.num_kv_blocks is not None, "the size of the pool is known"
        lengths = load.prompt_tokens + load.output_tokens
        longest = int(lengths.max())
        if longest > config.num_kv_blocks * size:
            raise ReplayError(
                f"a request of {longest} tokens does not fit in the {config.num_kv_blocks * size} of the KV pool"
            )
        blocks = -(-lengths // size) + 1
        most = int(blocks.sum())
        if load.hashes is None:
            most = min(most, (load.concurrency or len(blocks)) * int(blocks.max()))
        return config.model_copy(
            update={"num_kv_blocks": min(config.num_kv_blocks, most), "prefix_caching": load.hashes is not None}
        )

    def _simulated(self) -> Simulated:
        due, first, last = (
            np.array([getattr(each, name) for each in self._requests]) for name in ("due_ns", "first_ns", "last_ns")
        )
        outputs = np.maximum(np.array(self._outputs, dtype=float), 1.0)
        later = outputs > 1
        with np.errstate(invalid="ignore", divide="ignore"):
            tpot_ms = np.where(later, (last - first) / 1e6 / (outputs - 1), np.nan)
        answers = Answers(
            klass=np.full(len(due), "", dtype=object), served=~np.isnan(last), tpot_counts=later,
            ttft_ms=(first - due) / 1e6, tpot_ms=tpot_ms, e2e_ms=(last - due) / 1e6, due_ns=due, last_ns=last,
            output_tokens=outputs,
        )  # fmt: skip
        return Simulated(
            answers, device_ns=self._turns.device_ns, span_ns=float(np.nanmax(last) - due.min()),
            steps=self._turns.steps, preemptions=self._replica.observer.preemptions,
            most_running=self._counts.most_running, cached_tokens=self._counts.cached_tokens,
        )  # fmt: skip
