"""vLLM's scheduler as far as the probe touches it: the same names, arguments and order of calls, and no model."""

import sys
from collections import deque
from types import ModuleType, SimpleNamespace


class Request:
    def __init__(self, request_id: str, num_prompt_tokens: int, max_tokens: int):
        self.request_id, self.num_prompt_tokens, self.max_tokens = request_id, num_prompt_tokens, max_tokens
        self.num_computed_tokens, self.given, self.priority = 0, 0, 0
        self.status = SimpleNamespace(name="WAITING")
        self.prompt_token_ids = [424242] * num_prompt_tokens  # must never be in a stream


class KVCacheManager:
    def __init__(self, blocks: int):
        self.block_pool = SimpleNamespace(
            num_gpu_blocks=blocks + 1,
            cached_block_hash_to_block={},
            get_num_free_blocks=lambda: self.free,
            enable_caching=False,
        )
        self.free, self.held = blocks, {}

    def allocate_slots(self, request, num_new_tokens):
        need = -(-(request.num_computed_tokens + num_new_tokens) // 16) - self.held.get(request.request_id, 0)
        if need > self.free:
            return None
        self.free -= need
        self.held[request.request_id] = self.held.get(request.request_id, 0) + need
        return object()

    def release(self, request):
        self.free += self.held.pop(request.request_id, 0)


class Scheduler:
    def __init__(self, vllm_config, **_):
        self.vllm_config = vllm_config
        self.kv_cache_manager = KVCacheManager(vllm_config.cache_config.num_gpu_blocks)
        self.max_num_running_reqs = vllm_config.scheduler_config.max_num_seqs
        self.max_num_scheduled_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.waiting, self.running, self.requests = deque(), [], {}

    def add_request(self, request):
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def schedule(self, throttle_prefills=False):
        tokens, new, cached, preempted = {}, [], [], []
        budget, at = self.max_num_scheduled_tokens, 0
        while at < len(self.running) and budget > 0:
            request = self.running[at]
            count = min(max(request.num_prompt_tokens + request.given - request.num_computed_tokens, 1), budget)
            while self.kv_cache_manager.allocate_slots(request, count) is None:
                victim = self.running.pop()
                self._preempt_request(victim, 0.0)
                preempted.append(victim)
                if victim is request:
                    break
            if request in preempted:
                break
            tokens[request.request_id] = count
            cached.append((request.request_id, request.num_computed_tokens))
            budget, at = budget - count, at + 1
        while not preempted and self.waiting and budget > 0 and len(self.running) < self.max_num_running_reqs:
            request = self.waiting[0]
            count = min(request.num_prompt_tokens + request.given - request.num_computed_tokens, budget)
            if self.kv_cache_manager.allocate_slots(request, count) is None:
                break
            self.running.append(self.waiting.popleft())
            tokens[request.request_id] = count
            if request.given or getattr(request, "again", False):
                cached.append((request.request_id, request.num_computed_tokens))
            else:
                new.append(SimpleNamespace(req_id=request.request_id, num_computed_tokens=request.num_computed_tokens))
            budget -= count
        plan = SimpleNamespace(
            num_scheduled_tokens=tokens, total_num_scheduled_tokens=sum(tokens.values()), scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[name for name, _ in cached], num_computed_tokens=[past for _, past in cached],
                resumed_req_ids={name for name, _ in cached if getattr(self.requests[name], "again", False)},
            ),
            scheduled_spec_decode_tokens={}, preempted_req_ids={each.request_id for each in preempted},
        )  # fmt: skip
        for name, count in tokens.items():
            self.requests[name].num_computed_tokens += count
            self.requests[name].again = False
        return plan

    def _preempt_request(self, request, timestamp):
        self.kv_cache_manager.release(request)
        request.num_computed_tokens, request.again = 0, True
        self.waiting.appendleft(request)

    def get_grammar_bitmask(self, scheduler_output):
        return None

    def update_from_output(self, scheduler_output, model_runner_output):
        outputs = []
        for name in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(name)
            if request is None or request.num_computed_tokens < request.num_prompt_tokens + request.given:
                continue
            request.given += 1
            ended = request.given >= request.max_tokens
            outputs.append(
                SimpleNamespace(request_id=name, new_token_ids=[424242], finish_reason="length" if ended else None)
            )
            if ended:
                self._free(request)
        return {0: SimpleNamespace(outputs=outputs)}

    def finish_requests(self, request_ids, finished_status):
        for name in list(request_ids):
            if name in self.requests:
                self._free(self.requests[name])

    def _free(self, request):
        self.kv_cache_manager.release(request)
        self.requests.pop(request.request_id)
        if request in self.running:
            self.running.remove(request)
        if request in self.waiting:
            self.waiting.remove(request)

    def shutdown(self):
        pass


class AsyncScheduler(Scheduler):
    pass


def config(max_num_seqs=4, max_num_batched_tokens=64, blocks=32, overlaps=False, caches=True) -> SimpleNamespace:
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, async_scheduling=overlaps
        ),
        cache_config=SimpleNamespace(num_gpu_blocks=blocks, block_size=16, enable_prefix_caching=caches),
        model_config=SimpleNamespace(
            model="/home/somebody/models/tiny", max_model_len=512,
            hf_text_config=SimpleNamespace(
                vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2,
            ),
        ),
    )  # fmt: skip


def install(monkeypatch, scheduler: type = Scheduler, overlapping: type = AsyncScheduler) -> None:
    """Puts these classes where vLLM has its own."""
    for name in ("vllm", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, owner, found in (
        ("scheduler", "Scheduler", scheduler), ("async_scheduler", "AsyncScheduler", overlapping)
    ):  # fmt: skip
        module = ModuleType(f"vllm.v1.core.sched.{name}")
        setattr(module, owner, found)
        monkeypatch.setitem(sys.modules, module.__name__, module)
