"""SGLang's scheduler and plugin registry as far as the probe touches them (from the code of its 0.5.23 wheel): names,
arguments, the order of calls in its loops, and no model."""

import sys
from collections import deque
from enum import Enum
from types import ModuleType, SimpleNamespace

SOURCES = {  # where each hooked method stands in the wheel
    "srt/managers/scheduler.py": {
        "_add_request_to_queue": ["req", "is_retracted"], "get_next_batch_to_run": ["running_batch", "last_batch"],
        "run_batch": ["batch", "pp_proxy_tensors"], "process_batch_result": ["batch", "result"],
        "abort_request": ["recv_req"],
    },
    "srt/managers/tokenizer_manager.py": {"generate_request": ["obj", "request"]},
}  # fmt: skip


class Mode(Enum):
    EXTEND = 1
    DECODE = 2

    def is_extend(self):
        return self is Mode.EXTEND

    def is_decode(self):
        return self is Mode.DECODE


class Req:
    def __init__(self, rid, prompt_tokens, max_new_tokens):
        self.rid, self.origin_input_ids, self.output_ids = rid, [424242] * prompt_tokens, []
        self.sampling_params = SimpleNamespace(max_new_tokens=max_new_tokens)
        self.finished_reason, self.prefix_len = None, 0

    def finished(self):
        return self.finished_reason is not None


class Batch:
    def __init__(self, reqs, mode, extend_lens=None, prefix_lens=None):
        self.reqs, self.forward_mode = reqs, mode
        self.extend_lens, self.prefix_lens, self.forward_iter, self.batch_is_full = (
            extend_lens,
            prefix_lens,
            None,
            False,
        )

    def copy(self):
        other = Batch(self.reqs[:], self.forward_mode, self.extend_lens, self.prefix_lens)
        other.forward_iter = self.forward_iter
        return other


def _size(req):
    return len(req.origin_input_ids) + len(req.output_ids)


class Scheduler:
    page_size, max_prefill_tokens, chunked_prefill_size = 1, 256, None

    def __init__(self, max_running_requests=4, tokens=100_000, enable_overlap=False):
        self.max_running_requests, self.max_total_num_tokens = max_running_requests, tokens
        self.enable_overlap, self.forward_ct = enable_overlap, 0
        self.waiting_queue, self.running = [], []
        self.tree_cache = SimpleNamespace(evictable_size=lambda: 0)
        self.token_to_kv_pool_allocator = SimpleNamespace(
            available_size=lambda: self.max_total_num_tokens - self.held()
        )

    def held(self):
        return sum(len(req.origin_input_ids) + len(req.output_ids) for req in self.running)

    def _add_request_to_queue(self, req, is_retracted=False):
        self.waiting_queue.insert(0, req) if is_retracted else self.waiting_queue.append(req)

    def get_next_batch_to_run(self, running_batch, last_batch):
        self.running = [req for req in self.running if not req.finished()]
        while self.held() + len(self.running) > self.max_total_num_tokens:  # retract_decode
            self._add_request_to_queue(self.running.pop(), is_retracted=True)
        budget, came = self.max_prefill_tokens, []
        while self.waiting_queue and len(self.running) + len(came) < self.max_running_requests:
            req = self.waiting_queue[0]
            need = len(req.origin_input_ids) + len(req.output_ids)
            if need > budget or self.held() + sum(map(_size, came)) + need >= self.max_total_num_tokens:
                break
            came.append(self.waiting_queue.pop(0))
            budget -= need
        if came:
            lens = [len(req.origin_input_ids) + len(req.output_ids) for req in came]
            self.running += came
            batch = Batch(came, Mode.EXTEND, lens, [0] * len(came))
        else:
            batch = Batch(list(self.running), Mode.DECODE) if self.running else None
        return SimpleNamespace(batch_to_run=batch, running_batch=Batch(list(self.running), Mode.DECODE))

    def run_batch(self, batch, pp_proxy_tensors=None):
        self.forward_ct += 1
        batch.forward_iter = self.forward_ct
        return object()

    def process_batch_result(self, batch, result):
        for req in batch.reqs:
            if req.finished() or (batch.forward_mode.is_decode() and req not in self.running):
                continue
            req.output_ids.append(424242)
            if len(req.output_ids) >= req.sampling_params.max_new_tokens:
                req.finished_reason = SimpleNamespace(to_json=lambda: {"type": "length"})

    def abort_request(self, recv_req):
        self.waiting_queue = [req for req in self.waiting_queue if not req.rid.startswith(recv_req.rid)]

    def serve(self, requests, every=1):
        """The loop of SGLang, normal or overlapping, until nothing is left."""
        coming, results, last, turn = deque(requests), deque(), None, 0
        plans = []
        while coming or self.waiting_queue or last or any(not req.finished() for req in self.running):
            turn += 1
            if coming and turn % every == 0:
                self._add_request_to_queue(coming.popleft())
            batch = self.get_next_batch_to_run(running_batch=None, last_batch=last).batch_to_run
            if batch:
                plans.append([req.rid for req in batch.reqs])
                result = self.run_batch(batch)
                if self.enable_overlap:
                    results.append((batch.copy(), result))
                else:
                    self.process_batch_result(batch, result)
            if self.enable_overlap and last:
                self.process_batch_result(*results.popleft())
            last = batch
        return plans


class TokenizerManager:
    async def generate_request(self, obj, request=None):
        yield obj.rid


class HookType(Enum):
    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"


def install(monkeypatch, scheduler=Scheduler):
    """A fresh copy of the class where SGLang has its own; returns it, and `apply`, which puts the hooks around it."""
    owner = type("Scheduler", (scheduler,), dict(scheduler.__dict__))
    tokenizer = type("TokenizerManager", (TokenizerManager,), dict(TokenizerManager.__dict__))
    hooks = []

    class HookRegistry:
        @classmethod
        def register(cls, target, hook, hook_type):
            hooks.append((target, hook, hook_type))

    app = SimpleNamespace(added=[], add_middleware=lambda middleware: app.added.append(middleware))
    modules = {
        "sglang.srt.plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType},
        "sglang.srt.managers.scheduler": {"Scheduler": owner},
        "sglang.srt.managers.tokenizer_manager": {"TokenizerManager": tokenizer},
        "sglang.srt.entrypoints.http_server": {"app": app},
    }
    packages = ("sglang", "sglang.srt", "sglang.srt.plugins", "sglang.srt.managers", "sglang.srt.entrypoints")
    for name in (*packages, *modules):
        module = ModuleType(name)
        for attribute, value in modules.get(name, {}).items():
            setattr(module, attribute, value)
        monkeypatch.setitem(sys.modules, name, module)

    def apply():
        for target, hook, kind in hooks:
            holder = owner if ".Scheduler." in target else tokenizer
            name = target.rpartition(".")[2]
            setattr(holder, name, _wrapped(getattr(holder, name), hook, kind))

    return owner, tokenizer, app, apply


def _wrapped(original, hook, kind):
    def called(*args, **kwargs):
        if kind is HookType.AROUND:
            return hook(original, *args, **kwargs)
        if kind is HookType.BEFORE:
            changed = hook(*args, **kwargs)
            return original(*args, **kwargs) if changed is None else original(*changed[0], **changed[1])
        result = original(*args, **kwargs)
        changed = hook(result, *args, **kwargs)
        return result if changed is None else changed

    return called
