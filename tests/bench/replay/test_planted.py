"""Cases whose fault is only settings are pairs with their base; each run is one of the other's settings."""

import json

import pytest

from bench.replay.compare import Figure, Outcome
from bench.replay.planted import planted_pairs
from sojourn.diagnosis.score.truth import FaultRecord, write_fault
from sojourn.metrics.run.directory import RunDirectory

SERVED = {"max_num_seqs": 32, "max_num_batched_tokens": 512, "block_size": 16, "num_kv_blocks": 8192}


def record(folder, name: str, engine: dict, *, base: str | None = "chat", repeat: int = 1, blocks: int = 8192, **other):
    """A run of a case: `other` is what else its scenario has."""
    scenario = {"name": name, "description": name, "engine": engine, "arrivals": {"rate_rps": 12}, **other}
    served = {"engine": SERVED | engine | {"num_kv_blocks": blocks}}
    run = RunDirectory.create(folder / f"{name}--{repeat}", {
        "scenario": scenario, "seed": repeat, "engine": engine | {"served": served}, "hardware": {}, "versions": {},
        "wall_anchor": {}, "objectives": [], "client_error": {}, "valid": True, "core": {"num_kv_blocks": blocks},
    })  # fmt: skip
    write_fault(run, FaultRecord(
        case=name, workload="chat", severity=int(base is not None), repeat=repeat, base=base,
        control="healthy", plant=json.dumps({"engine": engine}),
    ))  # fmt: skip


def test_cases_of_settings_are_pairs_in_both_directions_and_others_are_not(tmp_path):
    for repeat in (1, 2):
        record(tmp_path, "chat", {"max_num_seqs": 32}, base=None, repeat=repeat)
        record(tmp_path, "cap", {"max_num_seqs": 2}, repeat=repeat, blocks=512)
    record(tmp_path, "pool", {"max_num_seqs": 32, "num_kv_blocks": 64}, blocks=64)
    record(tmp_path, "busier", {"max_num_seqs": 2}, arrivals={"rate_rps": 20})
    record(tmp_path, "slow", {"max_num_seqs": 2, "faults": "slow_device:factor=4"})
    record(tmp_path, "threads", {"max_num_seqs": 32, "threads": 1})
    found = {(pair.name, len(pair.replayed)): pair.settings for pair in planted_pairs(tmp_path)}
    assert found == {
        ("cap--1", 2): {"max_num_seqs": 32},
        ("chat--0", 1): {"num_kv_blocks": 64},
        ("chat--0", 2): {"max_num_seqs": 2},
        ("pool--1", 1): {"num_kv_blocks": 8192},
    }


def test_the_spread_is_that_of_the_change_and_decides_whether_a_sign_counts():
    first = Outcome(base=10, predicted=12, low=11, high=13, measured=12.5, at_its_speed=12.5, unchanged_width=1)
    alone = Figure([first], relative=True)
    assert alone.spread == pytest.approx(0.1) and alone.has_right_sign is True and alone.inside == 1
    second = Outcome(base=10, predicted=12, low=11, high=13, measured=9, at_its_speed=9, unchanged_width=1)
    both = Figure([first, second], relative=True)
    assert both.spread == pytest.approx(0.35) and both.has_right_sign is None and both.inside == 1
    assert both.error == pytest.approx(((12 / 12.5 - 1) + (12 / 9 - 1)) / 2)
    assert both.error_at_its_speed == 0
