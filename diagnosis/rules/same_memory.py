"""Fixes that take no more device memory: smaller keys and values, a window, and host memory below the pool.

A pool that was given as a number of blocks can have more of them. One that was given in bytes, or that takes what the
device has left, cannot be called too small by a larger number: it needs more tokens in the same bytes.
"""

import math
from typing import NamedTuple

from sojourn.diagnosis.facts import Facts
from sojourn.metrics.compute.cost_model import shape_from
from sojourn.metrics.memory.plan import GIB
from sojourn.metrics.prediction import Change
from sojourn.metrics.run.directory import section

IN_8_BITS = {"float32": 3.5, "bfloat16": 1.8, "float16": 1.8}  # tokens in the same memory, heads of 32 or more
LEAST_WINDOW = 512  # tokens: what most answers refer to; a smaller one costs more of their quality
WORTH_A_WINDOW = 1.25  # times the requests in the same blocks: for less nobody should change the outputs
BLOCK_SIZE = 16  # tokens, where a run does not say


class SameMemory(NamedTuple):
    """A change in words and as a replay: `fix.kv_scale` times the tokens in the same memory."""

    words: str
    fix: Change


def is_sized_in_bytes(facts: Facts) -> bool:
    """Whether the bytes of the pool are what was chosen, or what the device has left."""
    return "num_kv_blocks" not in facts.chosen


def smaller_kv(facts: Facts) -> SameMemory | None:
    """Keys and values in 8 bits, with a scale for each token and head. None where they have 8 bits or fewer."""
    times = IN_8_BITS.get(str(section(facts.meta, "core").get("dtype")))
    if times is None or (facts.engine.get("kv_cache_dtype") or "auto") != "auto":
        return None
    words = f"kv_cache_dtype=int8 (about {times:g} times the tokens in the same memory; outputs change a little)"
    return SameMemory(words, Change(settings={"kv_cache_dtype": "int8"}, kv_scale=times))


def window(facts: Facts) -> SameMemory | None:
    """A sliding window with sinks, behind which long requests give their blocks back. None where it frees little, for a
    model with windows, and where all blocks are kept. Nothing in a run tells what the outputs are worth with it."""
    shape, engine, rows = shape_from(facts.meta), facts.engine, facts.rows
    keeps_all = any(engine.get(name) is not None for name in ("kv_host_gib", "kv_disk_path", "kv_remote_url"))
    drafts = (engine.get("speculation") or "none") not in ("none", "ngram", "medusa")
    if shape is None or shape.longest_window is not None or keeps_all or drafts or "server_prompt_tokens" not in rows:
        return None
    served = rows[rows.status == "ok"]
    context = (served.server_prompt_tokens + served.server_output_tokens).astype("float64").dropna()
    budget = engine.get("max_prefill_chunk_tokens") or engine.get("max_num_batched_tokens")
    if not len(context) or not isinstance(budget, int):
        return None
    size = max(LEAST_WINDOW, 2 ** math.ceil(math.log2(max(float(context.quantile(0.9)) / 4, 1.0))))
    held = context.clip(upper=size + 2 * budget + 2 * (engine.get("block_size") or BLOCK_SIZE))
    times = float((context**2).sum() / (context * held).sum())  # a long request holds its blocks for longer
    if times < WORTH_A_WINDOW:
        return None
    words = (f"attention_window={size} with sinks (about {times:.1f} times the requests in the same blocks; it changes "
             "the outputs, and only your own evaluation can say how much)")  # fmt: skip
    return SameMemory(words, Change(settings={"attention_window": size}, kv_scale=times))


def host_tier(facts: Facts, target_blocks: int, pool_blocks: int) -> SameMemory | None:
    """Host memory that keeps what the pool evicts. None where there is a tier, or where a block's size is unknown."""
    of_token = section(facts.meta, "model_shape").get("kv_bytes_per_token")
    has_tier = any(facts.engine.get(name) is not None for name in ("kv_host_gib", "kv_disk_path", "kv_remote_url"))
    if has_tier or not of_token or not target_blocks or not pool_blocks:
        return None
    size = float(f"{max(host_gib(facts, target_blocks), 0.01):.2g}")
    words = f"kv_host_gib={size:g}: host memory keeps what the pool evicts"
    # How fast the tier would be was not measured: the room is taken for free.
    return SameMemory(words, Change(settings={"kv_host_gib": size}, kv_scale=max(1.1, target_blocks / pool_blocks)))


def host_gib(facts: Facts, blocks: int) -> float:
    """GiB that so many blocks take; 0 where nobody recorded what a token takes."""
    of_token = section(facts.meta, "model_shape").get("kv_bytes_per_token") or 0
    return blocks * (facts.engine.get("block_size") or BLOCK_SIZE) * of_token / GIB
