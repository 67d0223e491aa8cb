"""What KV events tell of the cache, against the engine's own shadow index in the same run."""

import msgspec
import pandas as pd
import pytest

from sojourn.metrics.memory.block_uses import UNKNOWN, block_uses
from sojourn.metrics.memory.kv_event_wire import decode_batch
from sojourn.metrics.memory.pool_history import PoolHistory
from sojourn.metrics.memory.prefix_outcomes import RATIOS
from tests.engine.memory.test_miss_ratio import BLOCK, one_shot_long, play, sessions, shared_system_prompt, zipf
from tests.further import further


def unaligned(trace):
    """No prompt ends with a block: the engine never looks up a prompt's last block, but stores it."""
    return [(due_ns, prompt[:-1] if len(prompt) % BLOCK == 0 else prompt, output) for due_ns, prompt, output in trace]


def history(simulation) -> PoolHistory:
    found = PoolHistory()
    for batch in simulation.published.kv_events:
        decoded = decode_batch(batch)
        for change in decoded.changes:
            found.apply(msgspec.structs.replace(change, ns=int(decoded.seconds * 1e9)))
    return found


@pytest.mark.parametrize(("trace", "blocks", "at_once"), [
    (zipf(150, 90), 120, 0),
    *further((sessions(300), 150, 1), (shared_system_prompt(300), 150, 0), (one_shot_long(300), 150, 2)),
])  # fmt: skip
def test_infinite_cache_of_the_events_is_that_of_the_shadow_index(trace, blocks, at_once):
    simulation = play(unaligned(trace), blocks, kv_events="map")
    assert not any(ended.preemptions for ended in simulation.published.ended.values())
    reports = [ended.prefix for ended in simulation.published.ended.values()]
    hits = sum(report.prefix_outcomes.get("hit", 0) for report in reports)
    infinite = sum(report.infinite_hit_tokens for report in reports)
    found = history(simulation)
    # Two requests that compute the same lost block at once both miss it, and it is stored once.
    assert infinite - hits > 20 * BLOCK and 0 <= infinite - hits - found.stored_again * BLOCK <= at_once * BLOCK
    tokens = sum(sum(report.prefix_outcomes.values()) for report in reports)
    for at, ratio in enumerate(RATIOS):
        if ratio > 1:
            shadow = sum(report.resized_hit_tokens[at] for report in reports)
            events = hits + found.saved_by((ratio - 1) * blocks) * BLOCK
            assert events / tokens == pytest.approx(shadow / tokens, abs=0.01)


def requests_of(simulation, trace) -> pd.DataFrame:
    """As the server records them."""
    rows = []
    for name, ended in simulation.published.ended.items():
        report = ended.prefix
        rows.append({
            "request_id": name, "scheduled_ns": ended.scheduled_ns, "finished_ns": ended.booked_ns, "token_ns": [],
            "prompt_tokens": len(trace[int(name[1:])][1]), "cached_tokens": ended.cached_tokens,
            "computed_tokens": ended.computed_tokens, "prompt_block_hashes": ended.prompt_block_hashes,
            "output_block_hashes": ended.output_block_hashes, "prefix_outcomes": report.prefix_outcomes,
            "infinite_hit_tokens": report.infinite_hit_tokens, "resized_hit_tokens": report.resized_hit_tokens,
        })  # fmt: skip
    return pd.DataFrame(rows)


@pytest.mark.parametrize(("trace", "blocks"), [
    (zipf(150, 90), 120), (sessions(150), 150),
    *further((zipf(600, 30), 200), (shared_system_prompt(300), 150), (one_shot_long(300), 150)),
])  # fmt: skip
def test_reuse_distances_of_the_records_give_the_curve_of_the_shadow_index(trace, blocks):
    rows = requests_of(play(trace, blocks), trace)
    uses = block_uses(rows, BLOCK)
    assert uses.infinite_tokens.sum() == rows.infinite_hit_tokens.sum()
    assert (uses.distance == UNKNOWN).mean() < 0.005, "output that a turn found before the record says it was there"
    for at, ratio in enumerate(RATIOS):
        shadow = sum(cell[at] for cell in rows.resized_hit_tokens) / uses.queried_tokens.sum()
        assert uses.hit_ratio(ratio * blocks) == pytest.approx(shadow, abs=0.01), ratio
