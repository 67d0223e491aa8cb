"""What the shadow index costs the core: time of a request's blocks with and without it, and memory when it is full.

python -m bench.memory_journal
"""

import gc
import statistics
import time
from random import Random

import psutil

from engine.memory.block_pool import BlockPool
from engine.memory.journal import Journal, NoJournal
from engine.memory.shadow.journal import ShadowJournal
from engine.request.placement import Placement
from engine.request.plan import StepPlan
from engine.request.request import Request
from engine.sampling import SamplingParams

BLOCK_SIZE = 16
PROMPT_TOKENS = 256
WARM_UP = 300  # requests: by then the pool is full, and every one evicts


def serve(placement: Placement, order: int, prompt: list[int]) -> float:
    """Microseconds of processor time that one request's blocks take: placed, filled and given back; no hashing."""
    sampling = SamplingParams(max_tokens=1)
    request = Request(order=order, id=f"r{order}", prompt_tokens=len(prompt), token_ids=prompt, sampling=sampling)
    request.block_hashes(BLOCK_SIZE, len(prompt) // BLOCK_SIZE)
    plan = StepPlan(PROMPT_TOKENS, PROMPT_TOKENS)
    begin_ns = time.thread_time_ns()
    assert placement.place(request, 0, plan)
    request.num_committed_tokens = request.num_computed_tokens = len(prompt)
    placement.publish(request)
    placement.give_back(request)
    placement.journal.settle()
    return (time.thread_time_ns() - begin_ns) / 1e3


def measure(kind: type[Journal], num_blocks: int, shared_tokens: int, requests: int = 1000) -> float:
    """The median request. The first `shared_tokens` of its prompt are cached."""
    pool, rng = BlockPool(num_blocks, BLOCK_SIZE), Random(0)
    placement = Placement(pool, kind(pool) if kind is ShadowJournal else kind())
    shared = rng.choices(range(30_000), k=shared_tokens)
    times = []
    for order in range(requests):
        times.append(serve(placement, order, shared + rng.choices(range(30_000), k=PROMPT_TOKENS - shared_tokens)))
        placement.journal.take_times()
    return statistics.median(times[WARM_UP:])


def fill_up(num_blocks: int) -> None:
    """Serves prompts that nobody repeats until the shadow index forgets."""
    pool, rng = BlockPool(num_blocks, BLOCK_SIZE), Random(0)
    journal = ShadowJournal(pool)
    placement, order = Placement(pool, journal), 0
    gc.collect()
    before = psutil.Process().memory_info().rss
    while not journal.shadow.forgotten:
        serve(placement, order, rng.choices(range(30_000), k=PROMPT_TOKENS))
        order += 1
    grown = psutil.Process().memory_info().rss - before
    begin_ns = time.thread_time_ns()
    gc.collect()
    collected_ms = (time.thread_time_ns() - begin_ns) / 1e6
    blocks = len(journal.shadow)
    print(f"{blocks:,} blocks known: {grown / 1e6:.0f} MB, {grown / blocks:.0f} bytes each; ", end="")
    print(f"all garbage collected in {collected_ms:.1f} ms")


if __name__ == "__main__":
    for num_blocks in (1000, 4096):
        for shared_tokens, name in ((0, "new"), (240, "cached")):
            without = measure(NoJournal, num_blocks, shared_tokens)
            with_it = measure(ShadowJournal, num_blocks, shared_tokens)
            print(f"{num_blocks} blocks, {name} prompt of {PROMPT_TOKENS} tokens: ", end="")
            print(f"{without:.0f} µs without, {with_it:.0f} with: {with_it - without:.0f} µs a request")
    fill_up(8192)
