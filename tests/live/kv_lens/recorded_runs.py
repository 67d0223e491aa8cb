"""Runs whose prompts were served by the simulated cache, with what caches of other sizes made of the same prompts."""

from sojourn.metrics.memory.prefix_outcomes import RATIOS
from sojourn.metrics.records import RequestRecord
from sojourn.metrics.records.tables import columns
from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.run.segments import replace_table
from tests.metrics.memory.simulated_cache import SECOND, SimulatedCache

BLOCK, POOL = 16, 30
NULLS = ("seed", "hardware", "versions", "wall_anchor", "objectives", "client_error", "valid")


def run_of(
    folder, traffic, *, events: bool, engine=None, core=True
) -> tuple[RunDirectory, dict[float, SimulatedCache]]:
    """A run of one request after the other, and what caches of each size made of the same prompts."""
    caches = {ratio: SimulatedCache(ratio * POOL, unfinished=1) for ratio in (*RATIOS, 1e9)}
    records = []
    for number, chain in enumerate(traffic):
        name, now_ns, tokens = f"r{number}", number * SECOND, len(chain) * BLOCK + 1
        hits = {ratio: cache.look_up(chain, now_ns, name) * BLOCK for ratio, cache in caches.items()}
        outcomes = {"hit": hits[1.0], "miss_evicted": hits[1e9] - hits[1.0], "miss_cold": tokens - hits[1e9]}
        records.append(
            RequestRecord(
                name, now_ns, now_ns + 1000, klass="even" if number % 2 == 0 else "odd", prompt_tokens=tokens,
                cached_tokens=hits[1.0], computed_tokens=tokens - hits[1.0], prompt_block_hashes=chain,
                scheduled_ns=now_ns, prefix_outcomes={key: value for key, value in outcomes.items() if value},
                infinite_hit_tokens=hits[1e9], resized_hit_tokens=[hits[ratio] for ratio in RATIOS],
                evicted_by={"r0": outcomes["miss_evicted"]} if outcomes["miss_evicted"] else {},
                evicted_ago_ns=2 * SECOND if outcomes["miss_evicted"] else None,
            )
        )  # fmt: skip
    meta = {"scenario": "test", "engine": engine or {}} | dict.fromkeys(NULLS)
    meta |= {"core": {"block_size": BLOCK, "num_kv_blocks": POOL}} if core else {}
    run = RunDirectory.create(folder, meta)
    replace_table(folder / "requests.parquet", columns("requests", records))
    if events:
        replace_table(folder / "kv_events.parquet", columns("kv_events", caches[1.0].events))
    return run, caches
