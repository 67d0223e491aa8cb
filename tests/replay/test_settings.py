"""Settings beside those that a change chooses."""

from sojourn.engine.config import EngineConfig
from sojourn.replay.settings import with_chosen


def test_what_the_engine_refuses_beside_a_chosen_setting_is_left_out():
    given = {"kv_cache_gib": 0.5, "policy": "shortest-prefill-first", "shortest_ageing": 3, "threads": 1,
             "max_prefill_chunk_tokens": 256}  # fmt: skip
    chosen = {"num_kv_blocks": 90, "policy": "fcfs", "max_num_batched_tokens": 128}
    found = with_chosen(given, chosen)
    assert found == {**chosen, "threads": 1, "max_prefill_chunk_tokens": 128}
    assert EngineConfig(model="tiny-model", **found).num_kv_blocks == 90
    assert with_chosen(given, {"max_num_seqs": 4}) == {**given, "max_num_seqs": 4}
