"""Runs in vLLM's environment: its own KV cache manager, recorded by the probe, without a server and without a model.

    python vllm_block_pool.py PROMPTS.json BLOCKS CACHES

PROMPTS.json has lists of token ids. They are served one after the other, each with four tokens of output. Prints the
tokens that vLLM found for each, as JSON. The record goes where SOJOURN_PROBE says.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from sojourn_probe.vllm_scheduler import CoreProbe
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

SIZE, CHUNK, OUTPUTS = 16, 64, 4


class Scheduler:
    """As much of vLLM's as the probe asks for."""

    def __init__(self, blocks: int, caches: bool):
        spec = FullAttentionSpec(block_size=SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
        config = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["a"], spec)])
        self.kv_cache_manager = KVCacheManager(
            config, max_model_len=8192, scheduler_block_size=SIZE, hash_block_size=SIZE, enable_caching=caches
        )
        self.max_num_running_reqs, self.max_num_scheduled_tokens = 1, CHUNK
        self.waiting, self.running, self.requests = (), [], {}
        cache = SimpleNamespace(block_size=SIZE, enable_prefix_caching=caches, num_gpu_blocks=blocks)
        self.vllm_config = SimpleNamespace(cache_config=cache)

    def _preempt_request(self, request):
        pass

    def get_grammar_bitmask(self, scheduler_output):
        pass


def serve(scheduler: Scheduler, probe: CoreProbe, request: Request) -> int:
    """Tokens that were found."""
    manager = scheduler.kv_cache_manager
    probe.arrived(request)
    found, hits, _ = manager.get_computed_blocks(request)
    request.status = RequestStatus.RUNNING
    is_new, outputs = True, 0
    while outputs < OUTPUTS:
        given = (hits, found) if is_new else (0, None)
        new = min(request.num_tokens - request.num_computed_tokens - given[0], CHUNK)
        begin_ns = probe.turn()
        assert manager.allocate_slots(request, new, *given) is not None, "the pool is too small for a request"
        name, past = request.request_id, request.num_computed_tokens + given[0]
        plan = SimpleNamespace(
            num_scheduled_tokens={name: new}, total_num_scheduled_tokens=new, scheduled_spec_decode_tokens={},
            scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=past)] if is_new else [],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[] if is_new else [name], num_computed_tokens=[] if is_new else [past], resumed_req_ids=set()
            ),
        )  # fmt: skip
        probe.planned(scheduler, plan, begin_ns)
        request.num_computed_tokens, is_new = past + new, False
        samples = request.num_computed_tokens == request.num_tokens
        if samples:
            outputs += 1
            request.append_output_token_ids(1000 + request.num_tokens * 7919 % 50_000)
        ended = "length" if outputs == OUTPUTS else None
        if ended:
            manager.free(request)
        output = SimpleNamespace(request_id=name, new_token_ids=[1] * samples, finish_reason=ended)
        probe.updated(plan, {0: SimpleNamespace(outputs=[output])}, probe.turn())
    return hits


def main() -> None:
    prompts = json.loads(Path(sys.argv[1]).read_text())
    caches = sys.argv[3] == "True"
    init_none_hash(sha256)
    scheduler = Scheduler(int(sys.argv[2]), caches)
    probe = CoreProbe.of(scheduler)
    assert probe is not None and probe._blocks is not None, "the probe does not fit"
    hasher = get_request_block_hasher(SIZE, sha256) if caches else None
    hits = [
        serve(scheduler, probe, Request(
            f"cmpl-r{number}-0-{number:08x}", tokens, SamplingParams(max_tokens=OUTPUTS), None, block_hasher=hasher,
        ))
        for number, tokens in enumerate(prompts)
    ]  # fmt: skip
    probe.writer.close()
    print(json.dumps(hits))


main()
