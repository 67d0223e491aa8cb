"""Hit rates of the eviction policies on a trace of prompts, by the size of the pool.

python -m bench.eviction [--trace FILE.jsonl] [--policies lru,worth] [--pools 0.02,0.05,...]

A line of the trace has `timestamp` in milliseconds and `hash_ids`, one for each block of the prompt, as Mooncake's
traces have. The real block pool and index run; nothing is computed. A request holds its blocks until `CONCURRENT`
later ones have come. Blocks of outputs are left out, because the trace does not name them.
"""

import json
from collections import deque
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from sojourn.engine.memory.block_pool import BlockPool
from sojourn.engine.memory.eviction import EVICTION_POLICIES, make_eviction_policy
from sojourn.engine.memory.eviction.ttl import Ttl

MOONCAKE = Path(__file__).parent.parent / "scenarios" / "traces" / "mooncake_conversation_trace.jsonl"
CONCURRENT = 8
TTL_SECONDS = 300.0


class Prompt(NamedTuple):
    timestamp_ms: int
    keys: list[bytes]  # a chain: an id at another place is another block


def read_trace(path: Path) -> list[Prompt]:
    prompts, chains = [], {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        keys, parent = [], 0
        for block in row["hash_ids"]:
            parent = chains.setdefault((parent, block), len(chains) + 1)
            keys.append(parent.to_bytes(8, "big"))
        prompts.append(Prompt(row["timestamp"], keys))
    return prompts


def hit_rate(prompts: list[Prompt], policy: str, num_blocks: int) -> float:
    """Share of the blocks of all prompts that the pool had."""
    now_ms = 0
    eviction = (
        Ttl(TTL_SECONDS, lambda: now_ms * 1_000_000) if policy == Ttl.name else make_eviction_policy(policy, num_blocks)
    )
    pool = BlockPool(num_blocks, 1, eviction=eviction)
    running: deque[list[int]] = deque()
    hits = total = 0
    for prompt in prompts:
        now_ms, keys = prompt
        blocks = pool.match(keys)
        total += len(keys)
        hits += len(blocks)
        pool.take(blocks)
        pool.used(blocks)
        found = len(blocks)
        while (fresh := pool.allocate(len(keys) - found)) is None:
            if not running:  # larger than the pool
                break
            done = running.popleft()
            pool.release(done, len(done))
        if fresh is None:
            pool.release(blocks, found)
            continue
        blocks = blocks + fresh
        for index in range(found, len(keys)):
            blocks[index] = pool.publish(blocks[index], keys[index], keys[index - 1] if index else None)
        running.append(blocks)
        if len(running) > CONCURRENT:
            done = running.popleft()
            pool.release(done, len(done))
    return hits / total


def main(
    trace: Annotated[Path, typer.Option(help="prompts with hash_ids, one JSON object a line")] = MOONCAKE,
    policies: Annotated[str, typer.Option(help="with commas between them")] = ",".join(EVICTION_POLICIES),
    pools: Annotated[str, typer.Option(help="pool sizes as shares of the distinct blocks")] = "0.02,0.05,0.1,0.2,0.4",
) -> None:
    prompts = read_trace(trace)
    blocks = [key for prompt in prompts for key in prompt.keys]
    distinct = len(set(blocks))
    table = Table(title=f"{len(prompts):,} prompts, {len(blocks):,} blocks, {distinct:,} distinct; hit rate in %")
    table.add_column("pool")
    names = policies.split(",")
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("no limit", justify="right")
    for share in (float(share) for share in pools.split(",")):
        num_blocks = int(share * distinct)
        rates = [f"{100 * hit_rate(prompts, name, num_blocks):.1f}" for name in names]
        table.add_row(f"{num_blocks:,} ({share:g})", *rates, f"{100 * (1 - distinct / len(blocks)):.1f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
