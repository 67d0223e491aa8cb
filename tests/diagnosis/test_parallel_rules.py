"""Parallel groups as causes: each is named where the times of its ranks say so, and not otherwise."""

import msgspec
import pytest

from sojourn.diagnosis.diagnose import diagnose
from sojourn.diagnosis.evidence import read_evidence
from sojourn.diagnosis.excess import excesses
from sojourn.diagnosis.proposals import proposals
from sojourn.metrics.compute.group_facts import group_facts
from sojourn.metrics.compute.link import LinkTime, fitted_link
from sojourn.metrics.compute.speed_run import entry_of_run
from sojourn.metrics.errors import ReplayError
from sojourn.metrics.prediction import Change
from sojourn.replay.parallel import told
from tests.metrics.sampled_machine import known, with_requests, with_steps
from tests.metrics.synthetic import synthetic_run

CAUSES = {"needless_parallelism", "communication_overhead", "pipeline_bubbles", "slow_rank", "expert_imbalance"}
LINKS = [  # of two layers: five sums and a gather take 0.4 ms
    fitted_link(name, "gloo", 2, [LinkTime(1 << 10, 60e3), LinkTime(1 << 20, 400e3)])
    for name in ("all_reduce", "all_gather")
]


def group_run(path, busy: float, waiting: float, activity: str, sizes: dict[str, int], **core):
    """Two ranks that compute for a share `busy` of each step, and exchange or wait for a share `waiting`."""
    made = known(synthetic_run(path, plant="slow_model", requests=24), **core)
    account = {"communication": "compute_communication", "bubble": "compute_bubble"}[activity]
    names = ("all_reduce", "all_gather") if activity == "communication" else ("recv",)

    def ranks(share: float):
        return lambda rows: [[int(ns * share)] * 2 for ns in rows.device_ns]

    run = with_steps(
        made,
        **{f"{activity}_ns": lambda rows: (rows.device_ns * waiting).astype("int64")},
        exchange_ns=lambda rows: [{name: int(ns * waiting / len(names)) for name in names} for ns in rows.device_ns],
        exchanged_bytes=lambda rows: [dict.fromkeys(names, 4096) for _ in rows.device_ns],
        rank_busy_ns=ranks(busy), rank_communication_ns=ranks(waiting if activity == "communication" else 0),
        rank_bubble_ns=ranks(waiting if activity == "bubble" else 0),
    )  # fmt: skip
    run = with_requests(
        run,
        **{f"{kind}_{account}_ns": lambda rows, kind=kind: (rows[f"{kind}_compute_decode_ns"] * waiting).astype("int64")
           for kind in ("ledger", "ttft")},
    )  # fmt: skip
    run = with_requests(
        run,
        **{f"{kind}_compute_decode_ns": lambda rows, kind=kind: rows[f"{kind}_compute_decode_ns"] - rows[
            f"{kind}_{account}_ns"] for kind in ("ledger", "ttft")},
    )  # fmt: skip
    run.update_meta(engine=(run.meta()["engine"] or {}) | sizes, ceilings={"links": msgspec.to_builtins(LINKS)})
    return run


def unequal_run(path, activity: str, sizes: dict[str, int], slow: int = 1, expert_tokens=()):
    """Two ranks of which one computes for nine tenths of each step, and the other waits for it after three tenths."""
    fast = 1 - slow
    made = group_run(path, 0.3, 0.6, activity, sizes)

    def ranks(of_slow: float, of_fast: float):
        shares = {slow: of_slow, fast: of_fast}
        return lambda rows: [[int(ns * shares[rank]) for rank in range(2)] for ns in rows.device_ns]

    return with_steps(
        made, rank_busy_ns=ranks(0.9, 0.3), **{f"rank_{activity}_ns": ranks(0.05, 0.6)},
        expert_tokens=lambda rows: [list(expert_tokens) for _ in rows.device_ns],
    )  # fmt: skip


@pytest.mark.parametrize("slow", [0, 1])
def test_rank_that_the_others_wait_for_is_named_and_no_link_is(tmp_path, slow):
    run = unequal_run(tmp_path / "run", "communication", {"tensor_parallel": 2, "threads": 1}, slow)
    (found,) = named(run).values()
    assert found.key == "slow_rank" and f"rank {slow} computes 3.0 times" in found.cause
    assert found.fixes[0].device_speed == pytest.approx(1 / 0.4, rel=0.01)


def test_stage_that_computes_far_longer_than_the_other_is_a_slow_rank(tmp_path):
    found = named(unequal_run(tmp_path / "run", "bubble", {"pipeline_parallel": 2}))
    assert "as the other stages" in found["slow_rank"].cause


def test_stage_that_has_the_head_is_no_slow_rank(tmp_path):
    run = with_steps(unequal_run(tmp_path / "run", "bubble", {"pipeline_parallel": 2}, 0),
                     flops_head=lambda rows: rows.flops * 0)  # fmt: skip
    assert "slow_rank" in named(run)
    run = with_steps(run, flops_head=lambda rows: (rows.flops * 0.5).astype("int64"))
    assert group_facts(run.meta(), run.table("steps")).slowest.times < 1.6
    assert "slow_rank" not in named(run)


def test_experts_of_one_rank_that_get_most_tokens_are_named_and_the_rank_is_not_slow(tmp_path):
    run = unequal_run(tmp_path / "run", "communication", {"expert_parallel": 2}, 0, [300, 200, 60, 40])
    (found,) = named(run).values()
    assert found.settings == {"expert_parallel": 1, "tensor_parallel": 2}
    assert "1.7 times the mean of the tokens go to the experts of rank 0" in found.cause
    assert diagnose(run).findings[0].key == "expert_imbalance"


def test_slow_rank_whose_experts_get_no_more_tokens_than_others_is_slow(tmp_path):
    run = unequal_run(tmp_path / "run", "communication", {"expert_parallel": 2}, 0, [80, 70, 90, 60])
    assert named(run).keys() == {"slow_rank"}
    other = unequal_run(tmp_path / "other", "communication", {"expert_parallel": 2}, 1, [300, 200, 60, 40])
    assert named(other).keys() == {"slow_rank"}, "the rank with few tokens computes longest"


def test_uneven_experts_that_cost_no_time_are_no_cause(tmp_path):
    run = with_steps(
        group_run(tmp_path / "run", 0.9, 0.1, "communication", {"expert_parallel": 2}),
        expert_tokens=lambda rows: [[30, 20, 6, 4] for _ in rows.device_ns],
    )
    assert group_facts(run.meta(), run.table("steps")).expert_imbalance == pytest.approx(50 / 30)
    assert not named(run)


def named(run) -> dict[str, object]:
    facts = read_evidence(run)
    found = {each.key: each for excess in excesses(facts) for each in proposals(facts, excess)}
    return {key: found[key] for key in CAUSES & found.keys()}


def test_two_ranks_whose_exchanges_cost_more_than_they_spare_are_not_needed(tmp_path):
    run = group_run(tmp_path / "run", 0.3, 0.7, "communication", {"tensor_parallel": 2, "threads": 1})
    links = [msgspec.structs.replace(link, latency_ns=5e6) for link in LINKS]  # slow, and as slow as measured
    run.update_meta(ceilings={"links": msgspec.to_builtins(links)})
    (found,) = named(run).values()
    assert found.key == "needless_parallelism" and found.settings == {"tensor_parallel": 1}
    assert found.fixes[0].device_speed == pytest.approx(1 / 0.6, rel=0.01)  # one process computes both halves
    assert any("spares" in each.statement and each.supports for each in found.evidence)
    assert diagnose(run).findings[0].key == "needless_parallelism"


def test_a_run_of_one_process_tells_what_one_takes_and_a_run_of_a_group_does_not(tmp_path):
    sizes = {"tensor_parallel": 2, "threads": 1}
    alone = known(synthetic_run(tmp_path / "alone", plant="slow_model", requests=24, seed=3))
    entry = msgspec.structs.replace(entry_of_run(alone, alone.meta()), identity=1)
    run = group_run(tmp_path / "run", 0.6, 0.4, "communication", sizes)
    of_group = msgspec.structs.replace(entry_of_run(run, run.meta()), identity=2)
    assert of_group.settings == entry.settings | {"tensor_parallel": 2}
    reference = {"family": "simulated", "entries": msgspec.to_builtins([of_group])}
    run.update_meta(speed_reference=reference)
    facts = group_facts(run.meta(), run.table("steps"))
    assert facts.measured_alone_ns is None and facts.one_process_ns == pytest.approx(1.2 * facts.device_ns, rel=0.01)
    run.update_meta(speed_reference=reference | {"entries": msgspec.to_builtins([of_group, entry])})
    facts = group_facts(run.meta(), run.table("steps"))
    assert facts.one_process_ns == facts.measured_alone_ns == pytest.approx(facts.device_ns, rel=0.1)


def test_exchanges_far_slower_than_the_measured_link_are_a_fault_of_the_link(tmp_path):
    run = group_run(tmp_path / "run", 0.3, 0.7, "communication", {"tensor_parallel": 2})
    found = named(run)
    assert found["communication_overhead"].fixes[0].device_speed > 2


def test_group_that_spares_more_than_it_exchanges_is_no_cause(tmp_path):
    run = group_run(tmp_path / "run", 0.9, 0.1, "communication", {"tensor_parallel": 2, "threads": 1})
    assert not named(run)


def test_model_that_one_gpu_cannot_hold_keeps_its_group(tmp_path):
    run = group_run(
        tmp_path / "run", 0.3, 0.7, "communication", {"tensor_parallel": 2}, device="cuda", weight_bytes=50 << 30
    )
    run.update_meta(hardware={"gpus": [{"name": "a GPU", "memory.total": "81559 MiB"}]})
    assert named(run).keys() == {"communication_overhead"}


def test_stages_that_wait_for_each_other_are_named(tmp_path):
    run = group_run(tmp_path / "run", 0.5, 0.5, "bubble", {"pipeline_parallel": 2})
    (found,) = named(run).values()
    assert found.key == "pipeline_bubbles" and found.settings == {"pipeline_parallel": 1}
    assert group_facts(run.meta(), run.table("steps")).bubble_shares == pytest.approx([0.5, 0.5], abs=0.01)
    full = group_run(tmp_path / "full", 0.95, 0.05, "bubble", {"pipeline_parallel": 2})
    assert not named(full)


def test_replay_of_one_process_in_place_of_a_group_has_its_speed_and_others_are_refused(tmp_path):
    run = group_run(tmp_path / "run", 0.3, 0.7, "communication", {"tensor_parallel": 2, "threads": 1})
    group = group_facts(run.meta(), run.table("steps"))
    one = Change(settings={"tensor_parallel": 1})
    assert told(one, group).device_speed == pytest.approx(1 / 0.6, rel=0.01)
    assert told(Change(settings={"tensor_parallel": 2}), group).device_speed == 1
    given = Change(settings={"tensor_parallel": 4}, device_speed=1.5)
    assert told(given, group) is given and told(one, None) is one
    for change, facts, sentence in (
        ({"tensor_parallel": 4}, group, "leaves a group of another size"),
        ({"tensor_parallel": 2}, None, "this run had one process"),
    ):
        with pytest.raises(ReplayError, match=sentence):
            told(Change(settings=change), facts)
