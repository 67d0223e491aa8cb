"""Runs in SGLang's environment: its own prefix cache and its own publisher of KV events, without a server and a model.

    python sglang_radix_cache.py PROMPTS.json BLOCKS [EVENTS REPLAY]

PROMPTS.json has lists of token ids. They are served one after the other, each as a session of its own. Prints the
tokens that SGLang found of each, as JSON, and with addresses publishes until its input ends.
"""

import json
import sys
import time
from array import array
from pathlib import Path

import torch
from sglang.srt.disaggregation.kv_events import EventPublisherFactory, KVEventBatch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.test.kits.unified_radix_cache import fixtures
from sglang.test.kits.unified_radix_cache.config import CacheConfig

SIZE = 16


def cache_of(blocks: int):
    """SGLang's default cache, and its pool of tokens, on the CPU."""
    fixtures.get_device = lambda: "cpu"
    config = CacheConfig(
        page_size=SIZE, kv_size=blocks * SIZE, num_layers=1, full_attention_layer_ids=(0,), head_num=1, head_dim=1
    )
    return fixtures.build_fixture(config, enable_kv_cache_events=True)[:2]


def serve(cache, pool, tokens: list[int], session: str) -> int:
    """Tokens that were found."""
    key = RadixKey(array("q", tokens[: len(tokens) // SIZE * SIZE]))
    match = cache.match_prefix(MatchPrefixParams(key=key))
    found, node = match.device_prefix_len, match.last_device_node
    lock = cache.inc_lock_ref(node)
    missing = len(key) - found
    if pool.available_size() < missing:
        cache.evict(EvictParams(num_tokens=missing - pool.available_size()))
    new = pool.alloc(missing)
    assert new is not None, "the pool is too small for a prompt"
    row = torch.cat([cache.path_device_indices(node)[:found], new])
    cache.insert(InsertParams(key=key, value=row, prev_prefix_len=found, session_id=session))
    cache.dec_lock_ref(node, lock)
    return found


def main() -> None:
    prompts, blocks = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    publisher = None
    if len(sys.argv) > 3:
        told = {"publisher": "zmq", "endpoint": sys.argv[3], "replay_endpoint": sys.argv[4]}
        publisher = EventPublisherFactory.create(json.dumps(told), 0)
    cache, pool = cache_of(blocks)
    hits = []
    for number, tokens in enumerate(prompts):
        hits.append(serve(cache, pool, tokens, f"session-{number}"))
        events = cache.take_events()
        if publisher is not None and events:
            publisher.publish(KVEventBatch(ts=time.time(), events=events))
    print(json.dumps({"hits": hits, "held": cache.evictable_size() // SIZE}), flush=True)
    if publisher is not None:
        sys.stdin.read()
        publisher.shutdown()


main()
