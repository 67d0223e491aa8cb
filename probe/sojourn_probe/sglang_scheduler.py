"""What is known between two calls of SGLang's scheduler, and the records of its steps.

SGLang waits for a step's result within `process_batch_result`: when the device was done with a step, and how long the
result was taken in after that, are not told apart.
"""

import time
from typing import Any

from sojourn_probe.records import Arrived, Ended, Setting, Step
from sojourn_probe.versions import version
from sojourn_probe.writer import Writer, begin

clock = time.monotonic_ns
UNSEEN = [
    "SGLang waits for a step's result where it takes it in, so what the host does with a result is in the step",
    "prompts that SGLang refuses are seen by their HTTP status alone",
]
_SETTINGS = {
    "max_num_seqs": "max_running_requests", "max_num_batched_tokens": "max_prefill_tokens",
    "max_prefill_chunk_tokens": "chunked_prefill_size", "block_size": "page_size",
}  # fmt: skip


class SchedulerProbe:
    def __init__(self, writer: Writer, scheduler: Any):
        self.writer = writer
        self._page = max(getattr(scheduler, "page_size", 1) or 1, 1)
        self._pool = scheduler.max_total_num_tokens // self._page
        self._cap = scheduler.max_running_requests
        self._budget = scheduler.max_prefill_tokens
        if chunk := getattr(scheduler, "chunked_prefill_size", None):
            self._budget = min(self._budget, chunk)
        self._handles: dict[str, int] = {}
        self._last_handle = self._steps = 0
        self._placed: set[str] = set()  # requests that have a place
        self._computed: dict[str, int] = {}  # positions that were planned
        self._given: dict[str, int] = {}  # output tokens before a result is taken in
        self._lost: dict[str, int] = {}  # positions of those that lost their place in this plan
        self._next: Step | None = None  # planned, and not launched yet
        self._launching: Step | None = None
        self._open: dict[int, Step] = {}  # by SGLang's number of the launch

    @classmethod
    def of(cls, scheduler: Any) -> "SchedulerProbe | None":
        settings: dict[str, Setting] = {
            ours: value
            for ours, theirs in _SETTINGS.items()
            if isinstance(value := getattr(scheduler, theirs, None), int) and value > 0
        }
        settings["async_scheduling"] = bool(getattr(scheduler, "enable_overlap", False))
        writer = begin("core", "sglang", version("sglang"), settings, {}, UNSEEN)
        return None if writer is None else cls(writer, scheduler)

    def arrived(self, req: Any) -> None:
        if req.rid in self._handles:
            return
        self._last_handle += 1
        self._handles[req.rid] = self._last_handle
        most = getattr(getattr(req, "sampling_params", None), "max_new_tokens", None)
        adapter = getattr(req, "lora_id", None)
        self.writer.put(
            Arrived(
                self._last_handle, req.rid, clock(), len(req.origin_input_ids), most,
                getattr(req, "priority", 0) or 0, adapter,
            )
        )  # fmt: skip

    def retracted(self, req: Any) -> None:
        if req.rid in self._placed:
            self._placed.discard(req.rid)
            self._lost[req.rid] = self._computed.pop(req.rid, 0)

    def turn(self, now_ns: int) -> None:
        if self._launching is not None:
            self._launching.next_ns = now_ns
            self._launching = None

    def planned(self, scheduler: Any, plan: Any, begin_ns: int) -> None:
        now_ns, batch, lost = clock(), plan.batch_to_run, self._lost
        self._lost, self._next = {}, None
        if batch is None or not batch.reqs or not (batch.forward_mode.is_extend() or batch.forward_mode.is_decode()):
            self._lost = lost
            return
        handles = self._handles
        names = [req.rid for req in batch.reqs]
        if batch.forward_mode.is_decode():
            new = [1] * len(names)
            past = [self._computed.get(name, 0) for name in names]
        else:
            new, past = list(batch.extend_lens), list(batch.prefix_lens)
        came = [at for at, name in enumerate(names) if name not in self._placed]
        self._placed.update(names)
        for name, count, before in zip(names, new, past, strict=True):
            self._computed[name] = before + count
        waiting, running = len(scheduler.waiting_queue), len(self._placed)
        evictable = int(scheduler.tree_cache.evictable_size()) // self._page
        unheld = int(scheduler.token_to_kv_pool_allocator.available_size()) // self._page + evictable
        self._next = Step(
            self._steps, begin_ns, now_ns, 0, 0, 0, 0, [handles.get(name, 0) for name in names], new, past, [], 0,
            waiting, running, self._refused(batch, plan, sum(new), bool(lost)) if waiting else "", self._budget,
            self._pool, min(unheld, self._pool), min(max(self._pool - unheld, 0) + evictable, self._pool),
            [handles.get(names[at], 0) for at in came], [past[at] for at in came],
            [handles.get(name, 0) for name in lost], list(lost.values()), [0] * len(lost),
        )  # fmt: skip
        self._steps += 1

    def launched(self, batch: Any) -> None:
        step, self._next = self._next, None
        if step is not None:
            step.launched_ns = clock()
            self._open[batch.forward_iter] = self._launching = step

    def before_result(self, batch: Any) -> None:
        self._given = {req.rid: len(req.output_ids) for req in batch.reqs}

    def processed(self, batch: Any) -> None:
        now_ns, before = clock(), self._given
        step = self._open.pop(batch.forward_iter, None)
        if step is not None:
            step.ready_ns = step.end_ns = now_ns
            step.given = [max(len(req.output_ids) - before.get(req.rid, 0), 0) for req in batch.reqs]
            if len(step.given) == len(step.handles):
                self.writer.put(step)
        for req in batch.reqs:
            if req.finished():
                reason = str(req.finished_reason.to_json().get("type", "stop"))
                self._end(req.rid, now_ns, reason)

    def aborted(self, recv_req: Any) -> None:
        """Those that wait end here; those that run end with their step."""
        for name in [name for name in self._handles if name not in self._placed]:
            if getattr(recv_req, "abort_all", False) or name.startswith(recv_req.rid):
                self._end(name, clock(), "abort")

    def _end(self, name: str, now_ns: int, reason: str) -> None:
        self._placed.discard(name)
        self._computed.pop(name, None)
        if (handle := self._handles.pop(name, None)) is not None:
            self.writer.put(Ended(handle, now_ns, reason))

    def _refused(self, batch: Any, plan: Any, tokens: int, lost: bool) -> str:
        if lost:
            return "kv_blocks"
        if batch.forward_mode.is_extend() and tokens >= self._budget:
            return "token_budget"
        if len(self._placed) >= self._cap:
            return "batch_cap"
        return "kv_blocks" if getattr(plan.running_batch, "batch_is_full", False) else "policy"
