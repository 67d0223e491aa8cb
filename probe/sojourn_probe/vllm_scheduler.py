"""A scheduler of vLLM that records what vLLM's own decides. It decides nothing itself."""

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from sojourn_probe.records import Arrived, Ended, Step
from sojourn_probe.signatures import misfit
from sojourn_probe.versions import vllm_version
from sojourn_probe.vllm_blocks import BlockProbe
from sojourn_probe.vllm_settings import settings_of, shape_of
from sojourn_probe.writer import Writer, begin

log = logging.getLogger("sojourn_probe")
clock = time.monotonic_ns
# Without these no step can be recorded: method → the names of its first parameters.
NEEDED = {
    "schedule": (),
    "update_from_output": ("scheduler_output", "model_runner_output"),
    "add_request": ("request",),
    "finish_requests": ("request_ids", "finished_status"),
}
# What a request that may not be planned yet waits for, by the name of its status.
_HELD = {"GRAMMAR": "grammar", "FSM": "grammar", "REMOTE_KVS": "kv_transfer"}


def scheduler_class() -> type:
    """vLLM's own class, recorded; or vLLM's own class and a sentence in the log, if this version does not fit."""
    try:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler as Overlapping
        from vllm.v1.core.sched.scheduler import Scheduler as Plain
    except ImportError as error:
        raise ImportError(f"sojourn-probe finds no scheduler of vLLM's V1 engine here: {error}") from error
    faults = [fault for name, names in NEEDED.items() if (fault := misfit(Plain, name, names))]
    if faults:
        log.warning("sojourn-probe is off: this is vLLM %s, and %s", vllm_version(), "; ".join(faults))
    return _chosen(Overlapping, Plain, recorded=not faults)


def _chosen(overlapping: type, plain: type, recorded: bool) -> type:
    """vLLM takes the overlapping class only where its configuration overlaps steps; so does this."""
    classes = {True: _recorded(overlapping), False: _recorded(plain)} if recorded else {True: overlapping, False: plain}

    class Scheduler(overlapping):  # type: ignore[misc, valid-type]
        """What `--scheduler-cls` names; each instance is of the class that vLLM would have chosen."""

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            config = kwargs.get("vllm_config", args[0] if args else None)
            overlaps = bool(getattr(getattr(config, "scheduler_config", None), "async_scheduling", True))
            made = classes[overlaps]
            instance = made.__new__(made)
            instance.__init__(*args, **kwargs)  # Python does not: it is no instance of cls
            return instance

    return Scheduler


def _recorded(base: type) -> type:
    class RecordedScheduler(base):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._probe = guarded(lambda: CoreProbe.of(self))

        def add_request(self, request: Any) -> None:
            super().add_request(request)
            if self._probe is not None:
                self._watch(self._probe.arrived, request)

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            probe = self._probe
            if probe is None:
                return super().schedule(*args, **kwargs)
            begin_ns = probe.turn()
            output = super().schedule(*args, **kwargs)
            self._watch(probe.planned, self, output, begin_ns)
            return output

        def get_grammar_bitmask(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if self._probe is not None:
                self._probe.launched(scheduler_output)
            return super().get_grammar_bitmask(scheduler_output, *args, **kwargs)

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any) -> Any:
            probe = self._probe
            if probe is None:
                return super().update_from_output(scheduler_output, model_runner_output, *args, **kwargs)
            ready_ns = probe.turn()
            result = super().update_from_output(scheduler_output, model_runner_output, *args, **kwargs)
            self._watch(probe.updated, scheduler_output, result, ready_ns)
            return result

        def finish_requests(self, request_ids: Any, finished_status: Any, *args: Any, **kwargs: Any) -> Any:
            names = [request_ids] if isinstance(request_ids, str) else request_ids
            names = list(self.requests) if names is None else list(names)
            result = super().finish_requests(names, finished_status, *args, **kwargs)
            if self._probe is not None:
                self._watch(self._probe.aborted, names, finished_status)
            return result

        def shutdown(self, *args: Any, **kwargs: Any) -> Any:
            if self._probe is not None:
                guarded(self._probe.writer.close)
            return super().shutdown(*args, **kwargs)

        def _watch(self, record: Callable[..., None], *args: Any) -> None:
            """A fault of the probe is the end of the probe, not of the server."""
            try:
                record(*args)
            except Exception as error:
                self._probe = None
                log.warning("sojourn-probe switches itself off after a fault of its own: %r", error)

    RecordedScheduler.__name__ = f"Recorded{base.__name__}"
    return RecordedScheduler


def guarded(call: Callable[[], Any]) -> Any:
    """The result; None with a sentence in the log where the call fails."""
    try:
        return call()
    except Exception as error:
        log.warning("sojourn-probe is off: %r", error)
        return None


class CoreProbe:
    """What is known between two calls of the scheduler."""

    def __init__(self, writer: Writer, scheduler: Any):
        self.writer = writer
        self._pool = getattr(getattr(scheduler, "kv_cache_manager", None), "block_pool", None)
        self._cap = getattr(scheduler, "max_num_active_reqs", None) or scheduler.max_num_running_reqs
        self._budget = scheduler.max_num_scheduled_tokens
        self._handles: dict[str, int] = {}
        self._last_handle = 0
        self._steps = 0
        self._open: dict[int, Step] = {}  # by id() of vLLM's own plan, which lives until its result is there
        self._launching: Step | None = None
        self._computed: dict[str, int] = {}  # of those that were preempted in this plan
        self._blocks: BlockProbe | None = None
        self._lacked_blocks: str | None = None  # the last request for which there were no blocks
        self._taker: dict[str, str] = {}

    @classmethod
    def of(cls, scheduler: Any) -> "CoreProbe | None":
        manager, unseen = getattr(scheduler, "kv_cache_manager", None), []
        faults = {
            "waits for KV blocks are told from other waits by elimination": misfit(
                manager, "allocate_slots", ("request",)
            ),
            "what preempted requests had computed is not seen": misfit(scheduler, "_preempt_request", ("request",)),
            "host and device time of overlapping steps are told apart less well": misfit(
                scheduler, "get_grammar_bitmask", ("scheduler_output",)
            ),
        }
        for consequence, fault in faults.items():
            if fault:
                unseen.append(f"{consequence}: {fault}")
                log.warning("sojourn-probe: %s", unseen[-1])
        if fault := BlockProbe.misfits(scheduler):
            unseen.append(fault)
            log.warning("sojourn-probe: %s", fault)
        config = scheduler.vllm_config
        writer = begin("core", "vllm", vllm_version(), settings_of(config), shape_of(config), unseen)
        if writer is None:
            return None
        probe = cls(writer, scheduler)
        found = list(faults.values())
        if found[0] is None:
            probe._blocks = BlockProbe.of(writer, scheduler, probe._handles)
            manager.allocate_slots = probe.allocation(manager.allocate_slots)
        if found[1] is None:
            scheduler._preempt_request = probe.preemption(scheduler._preempt_request)
        return probe

    def allocation(self, allocate: Callable[..., Any]) -> Callable[..., Any]:
        def allocate_slots(request: Any, *args: Any, **kwargs: Any) -> Any:
            name, known = request.request_id, self._blocks
            if known is None:
                blocks = allocate(request, *args, **kwargs)
            else:
                known.allocating = name
                blocks = allocate(request, *args, **kwargs)
                known.allocating = None
                if known.removed or known.stored or name in known.without_blocks:
                    known.allocated(name, blocks is not None)
            if blocks is None:
                self._lacked_blocks = name
            return blocks

        return allocate_slots

    def preemption(self, preempt: Callable[..., Any]) -> Callable[..., Any]:
        def preempt_request(request: Any, *args: Any, **kwargs: Any) -> Any:
            self._computed[request.request_id] = request.num_computed_tokens
            if self._lacked_blocks is not None:
                self._taker[request.request_id] = self._lacked_blocks
            return preempt(request, *args, **kwargs)

        return preempt_request

    def arrived(self, request: Any) -> None:
        name = request.request_id
        if name in self._handles:
            return  # a further part of a streamed prompt
        self._last_handle += 1
        self._handles[name] = self._last_handle
        adapter = getattr(getattr(request, "lora_request", None), "lora_name", None)
        self.writer.put(
            Arrived(
                self._last_handle, name, clock(), request.num_prompt_tokens, getattr(request, "max_tokens", None),
                getattr(request, "priority", 0), adapter,
            )
        )  # fmt: skip
        if self._blocks is not None:
            self._blocks.arrived(request)

    def turn(self) -> int:
        """The loop begins to plan, or has a result: what was launched before has returned."""
        now_ns = clock()
        if self._launching is not None:
            self._launching.next_ns = now_ns
            self._launching = None
        return now_ns

    def launched(self, plan: Any) -> None:
        if (step := self._open.get(id(plan))) is not None and not step.launched_ns:
            step.launched_ns = clock()

    def planned(self, scheduler: Any, plan: Any, begin_ns: int) -> None:
        now_ns, tokens = clock(), plan.num_scheduled_tokens
        preempted, takers, lacked = self._computed, self._taker, self._lacked_blocks
        self._computed, self._taker, self._lacked_blocks = {}, {}, None
        if not tokens and not preempted:
            return
        handles, cached_plan = self._handles, plan.scheduled_cached_reqs
        past = dict(zip(cached_plan.req_ids, cached_plan.num_computed_tokens, strict=True))
        admitted, hits = [], []
        for new in plan.scheduled_new_reqs:
            past[new.req_id] = new.num_computed_tokens
            admitted.append(handles.get(new.req_id, 0))
            hits.append(new.num_computed_tokens)
        for name in _resumed(cached_plan):
            admitted.append(handles.get(name, 0))
            hits.append(past[name])
        waiting = _waiting(scheduler)
        pool = self._pool
        step = Step(
            self._steps, begin_ns, now_ns, 0, 0, 0, 0,
            [handles.get(name, 0) for name in tokens], list(tokens.values()), [past.get(name, 0) for name in tokens],
            [], sum(map(len, plan.scheduled_spec_decode_tokens.values())), waiting, len(scheduler.running),
            self._refused(scheduler, plan, bool(preempted), lacked) if waiting else "", self._budget,
            pool.num_gpu_blocks - 1 if pool is not None else 0,
            pool.get_num_free_blocks() if pool is not None else 0,
            len(pool.cached_block_hash_to_block) if pool is not None else 0,
            admitted, hits,
            [handles.get(name, 0) for name in preempted], list(preempted.values()),
            [handles.get(takers.get(name, ""), 0) for name in preempted],
        )  # fmt: skip
        self._steps += 1
        self._open[id(plan)] = self._launching = step

    def updated(self, plan: Any, result: Any, ready_ns: int) -> None:
        step = self._open.pop(id(plan), None)
        end_ns = clock()
        given: dict[str, int] = {}
        ended = []
        for outputs in (result or {}).values():
            for output in outputs.outputs:
                given[output.request_id] = len(output.new_token_ids)
                if output.finish_reason is not None:
                    ended.append((output.request_id, str(output.finish_reason)))
        if step is not None:
            step.ready_ns, step.end_ns = ready_ns, end_ns
            step.given = [given.get(name, 0) for name in plan.num_scheduled_tokens]
            self.writer.put(step)
        for name, reason in ended:
            self._end(name, end_ns, reason)

    def aborted(self, names: Iterable[str], status: Any) -> None:
        reason = "error" if "ERROR" in getattr(status, "name", "") else "abort"
        for name in names:
            self._end(name, clock(), reason)

    def _end(self, name: str, now_ns: int, reason: str) -> None:
        if (handle := self._handles.pop(name, None)) is not None:
            self.writer.put(Ended(handle, now_ns, reason))
        if self._blocks is not None:
            self._blocks.ended(name)

    def _refused(self, scheduler: Any, plan: Any, preempted: bool, lacked: str | None) -> str:
        """Why the first waiting request got no place, in the order in which vLLM's loop asks."""
        if preempted:
            return "kv_blocks"
        if plan.total_num_scheduled_tokens >= self._budget:
            return "token_budget"
        if len(scheduler.running) >= self._cap:
            return "batch_cap"
        if lacked is not None:
            return "kv_blocks"
        status = getattr(_head(scheduler), "status", None)
        for word, reason in _HELD.items():
            if word in getattr(status, "name", ""):
                return reason
        return "policy"


def _resumed(cached_plan: Any) -> list[str]:
    found = getattr(cached_plan, "resumed_req_ids", None)
    if found is not None:
        return [name for name in cached_plan.req_ids if name in found]
    flags = getattr(cached_plan, "resumed_from_preemption", ())
    return [name for name, resumed in zip(cached_plan.req_ids, flags, strict=False) if resumed]


def _waiting(scheduler: Any) -> int:
    queues = ("waiting", "skipped_waiting", "kv_holding_waiting")
    return sum(len(getattr(scheduler, name, ())) for name in queues)


def _head(scheduler: Any) -> Any:
    for name in ("kv_holding_waiting", "waiting", "skipped_waiting"):
        queue = getattr(scheduler, name, None)
        if queue:
            return next(iter(queue))
    return None
