"""Tables of drafts, adapters and KV tiers: small records whose sums are known."""

import msgspec
import pandas as pd
import pytest

from sojourn.metrics.compute.cost_model import PARTS
from sojourn.metrics.compute.group_facts import group_facts
from sojourn.ui.figures.compute import PART_COLOURS
from sojourn.ui.figures.group import experts, ranks
from sojourn.ui.figures.speculation import acceptance_by_position
from sojourn.ui.tables.adapters import adapters
from sojourn.ui.tables.group import MEANING, collectives, expert_sentence, group_sentence
from sojourn.ui.tables.memory import load_sentence
from sojourn.ui.tables.speculation import acceptance, acceptance_table, draft_sentence
from tests.metrics.sampled_machine import SHAPE


def test_acceptance_is_of_all_drafts_and_of_those_that_could_be_accepted():
    steps = pd.DataFrame({
        "drafted_by_position": [[4, 4, 2], [], [6, 4]], "accepted_by_position": [[3, 1, 0], [], [5, 4]],
        "undrafted": [{"acceptance": 2}, {}, {"acceptance": 1, "last_token": 1}], "draft_ns": [1000, 0, 2000],
    })  # fmt: skip
    found = acceptance(steps)
    assert found.drafted.tolist() == [10, 8, 2] and found.accepted.tolist() == [8, 5, 0]
    assert found.share.tolist() == [0.8, 0.625, 0.0] and found.given.tolist() == [0.8, 0.625, 0.0]
    assert acceptance_table(found).iloc[0].tolist()[1:3] == ["10", "8"]
    bars, line = acceptance_by_position(found).data
    assert list(bars.y) == pytest.approx([80, 62.5, 0]) and len(line.x) == 3
    sentence = draft_sentence(steps, pd.DataFrame({"rejected_ns": [4e6, None]}))
    assert "Rejected drafts took 4 ms" in sentence and "3 times few drafts were accepted" in sentence
    assert acceptance(steps.assign(drafted_by_position=[[], [], []])).empty
    assert acceptance(pd.DataFrame({"step": [1]})).empty


def test_adapters_have_their_requests_reads_and_waits():
    requests = pd.DataFrame({
        "adapter": ["b", "a", None, "b"], "adapter_loads": [1, 1, 0, 0], "output_tokens": [10, 5, 7, 20],
        "ledger_memory_adapter_load_ns": [4e6, 2e6, 0, 0], "waits": [{"adapter": 6_000_000}, {}, {}, {"step": 9}],
    })  # fmt: skip
    table = adapters(requests)
    assert table.adapter.tolist() == ["b", "a"] and table.requests.tolist() == ["2", "1"]
    assert table.iloc[0].tolist()[2:] == ["30", "1", "2 ms", "4 ms", "3 ms", "6 ms"]
    assert adapters(requests.assign(adapter=None)).empty


def test_a_skipped_load_is_told_with_both_predictions():
    requests = pd.DataFrame({
        "load_decision": ["load", "recompute", None], "load_predicted_ns": [1e6, 8e6, None],
        "recompute_predicted_ns": [5e6, 2e6, None],
    })  # fmt: skip
    sentence = load_sentence(requests)
    assert "2 requests found" in sentence and "1 of them" in sentence and "2 ms against 8 ms" in sentence
    assert load_sentence(requests[:1]).endswith("all of them loaded it.")
    assert load_sentence(requests[2:]) == "No request found a part of its prefix in a tier."


def test_ranks_and_exchanges_of_a_group_sum_to_what_was_recorded():
    steps = pd.DataFrame({
        "new_tokens": [[4, 1], [1, 1]], "logit_rows": [2, 2], "device_ns": [10e6, 10e6],
        "communication_ns": [6_000_000, 2_000_000],
        "exchanged_bytes": [{"all_reduce": 4000}, {"all_reduce": 2000}],
        "exchange_ns": [{"all_reduce": 6_000_000}, {"all_reduce": 2_000_000, "send": 100_000, "recv": 500_000}],
        "exchange_hidden_ns": [{}, {"send": 40_000}],
        "rank_busy_ns": [[4e6, 5e6], [8e6, 3e6]], "rank_communication_ns": [[6e6, 5e6], [2e6, 7e6]],
        "rank_bubble_ns": [[0, 0], [0, 0]], "expert_tokens": [[12, 4], []],
        "expert_imbalance_percent": [[150, 200], []],
    })  # fmt: skip
    shape = msgspec.to_builtins(SHAPE)
    meta = {"model_shape": shape, "core": {"dtype": "float32", "device": "cpu"}, "engine": {"tensor_parallel": 2}}
    group = group_facts(meta, steps)
    assert group.busy_ns == [12e6, 8e6] and group.communication_share == pytest.approx(0.4)
    sums, sent, received = collectives(group).to_numpy().tolist()
    assert sums == ["all-reduce", MEANING["all_reduce"], "0.006", "8 ms", "40%", "–", "0 ns"]
    assert (sent[-1], received[-1]) == ("40 µs", "0 ns"), "hidden is what was measured"
    busy, exchanging, waiting = ranks(group).data
    assert list(busy.x) == [0.012, 0.008] and list(exchanging.x) == [0.008, 0.012] and list(waiting.x) == [0, 0]
    assert "1.20 times the mean" in group_sentence(group)
    assert list(experts(steps).data[0].y) == [1.5, 0.5] and experts(steps[1:]) is None
    assert "1.8 times the mean (median), 2.0 at most" in expert_sentence(steps)
    assert group_facts(meta | {"engine": {}}, steps) is None


def test_every_part_of_a_model_has_its_colour():
    """A part without one stops the page Compute."""
    assert set(PART_COLOURS) == set(PARTS)
