"""What settings of a server are known to do to its figures."""

from collections.abc import Mapping
from typing import NamedTuple


class Effect(NamedTuple):
    """What a setting is known to do. `figures`: how each moves where the setting is lower or off; 0 for either way."""

    setting: str
    figures: Mapping[str, int]
    words: str


NO_CACHE = {"ttft_ms": 1, "prefill_ms": 1, "hit_rate": -1, "prompt_tokens_per_s": 1}
STEPS = {"itl_ms": 0, "tpot_ms": 0, "ttft_ms": 0, "decode_ms": 0, "prefill_ms": 0}
SMALL_POOL = {"queue_ms": 1, "kv_use": 1, "preemptions": 1, "waiting": 1, "ttft_ms": 1}
CACHE_OFF = "without the prefix cache every prompt is computed whole, so prefills are longer"
CHUNK = "it sets how many prompt tokens a step computes, and so how long the others' tokens wait"
POOL = "it sets how many requests fit into the KV cache at a time"
EFFECTS = (
    Effect("enable_prefix_caching", NO_CACHE, CACHE_OFF),
    Effect("disable_radix_cache", {name: -sign for name, sign in NO_CACHE.items()}, CACHE_OFF),
    Effect("max_num_batched_tokens", {"itl_ms": 0, "tpot_ms": 0, "ttft_ms": 0, "prefill_ms": 1}, CHUNK),
    Effect("chunked_prefill_size", {"itl_ms": 0, "tpot_ms": 0, "ttft_ms": 0, "prefill_ms": 1}, CHUNK),
    Effect("max_num_seqs", {"queue_ms": 1, "ttft_ms": 1, "waiting": 1, "running": -1, "itl_ms": -1, "tpot_ms": -1},
           "it caps how many requests run at a time: the others wait"),
    Effect("num_gpu_blocks", SMALL_POOL, POOL),
    Effect("kv_cache_tokens", SMALL_POOL, POOL),
    Effect("gpu_memory_utilization", SMALL_POOL, POOL),
    Effect("enforce_eager", {"itl_ms": -1, "tpot_ms": -1, "decode_ms": -1}, "without graphs each step takes longer"),
    Effect("tensor_parallel_size", STEPS, "the model is divided among another number of devices"),
    Effect("quantization", STEPS, "the weights have another form"),
    Effect("dtype", STEPS, "the weights have another form"),
    Effect("kv_cache_dtype", {"kv_use": 0, "preemptions": 0, "itl_ms": 0}, "the KV cache has another form"),
    Effect("attention_backend", STEPS, "attention is computed by another kernel"),
    Effect("speculative_config", {"itl_ms": 0, "tpot_ms": 0}, "drafts change how many tokens a step gives"),
    Effect("model", STEPS | {"e2e_ms": 0}, "another model was served"),
    Effect("version", STEPS | {"e2e_ms": 0, "queue_ms": 0}, "another version was served, with defaults of its own"),
)  # fmt: skip
SMALLEST_DEFAULT = {"max_num_seqs": 128}  # of all versions and devices of vLLM
