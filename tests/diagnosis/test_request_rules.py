"""Causes of requests and scheduling on runs with a known truth, and what an evidence level hides."""

from dataclasses import replace

import pandas as pd
import pytest

from sojourn.diagnosis.capacity import load
from sojourn.diagnosis.chunk_facts import chunks_of
from sojourn.diagnosis.diagnose import diagnose
from sojourn.diagnosis.evidence import Records, is_joined, read_evidence
from sojourn.diagnosis.evidence_level import LEVELS, view_at_level
from sojourn.diagnosis.excess import SERVED, excesses, losses
from sojourn.diagnosis.proposal import CONTRADICTION
from sojourn.diagnosis.proposals import proposals
from sojourn.diagnosis.validity import lateness
from sojourn.diagnosis.verdict import support_of
from tests.metrics.simulated_server import Settings
from tests.metrics.synthetic import PLANTS, Klass, Plant, synthetic_run


def late_ms(run, add: float) -> None:
    """The load generator sends every request so much later; the server's side and all latencies from sending stay."""
    table = pd.read_parquet(run.path / "client.parquet")
    table["due_ns"] -= int(add * 1e6)
    table.to_parquet(run.path / "client.parquet")


def steps_of(*entries: tuple[list[str], list[int], list[int]], budget: int = 64) -> pd.DataFrame:
    """A `steps` table of prompt chunks: ids, new tokens, past tokens of each step."""
    rows = [{"request_ids": ids, "new_tokens": new, "past_tokens": past, "kinds": ["prefill"] * len(ids),
             "budget": budget} for ids, new, past in entries]  # fmt: skip
    return pd.DataFrame(rows)


def test_cuts_at_the_limit_of_a_chunk_are_told_from_those_by_the_budget():
    names = [f"r{number}" for number in range(6)]
    entries = [([name], [8], [past]) for name in names for past in (0, 8, 16, 24)]
    by_limit = chunks_of(steps_of(*entries), dict.fromkeys(names, 32), {"max_prefill_chunk_tokens": 8})
    assert by_limit.cut_by_chunk_limit == 1.0 and by_limit.cut_by_budget == 0.0 and by_limit.per_prompt == 4
    by_budget = chunks_of(steps_of(*entries, budget=8), dict.fromkeys(names, 32), {})
    assert by_budget.cut_by_chunk_limit == 0.0 and by_budget.cut_by_budget == 1.0


def test_capacity_that_was_exceeded_is_doubted(tmp_path):
    facts = read_evidence(synthetic_run(tmp_path / "run", plant="overload", requests=80))
    excess = excesses(facts)[0]
    sound = next(each for each in proposals(facts, excess) if each.key == "overload")
    served = replace(facts, served_rps=10 * sound.capacity_rps)
    doubted = next(each for each in proposals(served, excess) if each.key == "overload")
    against = [fact for fact in doubted.evidence if not fact.supports and fact.weight == CONTRADICTION]
    assert len(against) == 1 and "were served" in against[0].statement
    assert support_of(doubted.evidence) < support_of(sound.evidence)


def test_overload_beside_a_cache_that_is_off_claims_no_more_than_is_known(tmp_path):
    facts = read_evidence(synthetic_run(tmp_path / "run", plant="overload", requests=80))
    off = replace(facts, engine=facts.engine | {"prefix_caching": False}, prefix=None, measured_by="server")
    said = {
        name: next(each.cause for each in proposals(of, excesses(of)[0]) if each.key == "overload")
        for name, of in {"on": facts, "off": off, "client": replace(off, measured_by="client")}.items()
    }
    assert "unless prompts repeat" in said["off"]
    assert said["on"].endswith("no policy will help") and said["client"].endswith("no policy will help")


def test_queue_that_refuses_what_could_be_served_is_named(tmp_path):
    plant = replace(PLANTS["burst"], settings=Settings(max_waiting=1, max_num_seqs=4))
    run = synthetic_run(tmp_path / "run", plant=plant)
    run.update_meta(engine=run.meta()["engine"] | {"max_waiting": 1})
    facts = read_evidence(run)
    assert losses(facts)[0].objective == SERVED and "429" in losses(facts)[0].error
    found = diagnose(run).findings
    assert "queue_limit" in [each.key for each in found if each.role == "cause"]
    named = next(each for each in found if each.key == "queue_limit")
    assert named.change.settings["max_waiting"] > 2 and named.explains_share == 1.0


PATIENT = {"klass": "document", "ttft_ms": 20_000.0, "source": "chosen for the test"}
SOON = {"klass": "all", "ttft_ms": 800.0, "tpot_ms": 60.0, "source": "chosen for the test"}
LONG = Klass(prompt_tokens=600, output_tokens=20)
RULED = {
    "head_of_line": (
        Plant(rate_rps=3.0, klasses=(Klass(weight=0.8), Klass("document", 0.2, prompt_tokens=4000, output_tokens=8)),
              objectives=(SOON | {"klass": "chat", "ttft_ms": 500.0}, PATIENT)),
        {"policy": "shortest-prefill-first"},
    ),
    "prefill_chunk": (
        Plant(rate_rps=2.0, klasses=(LONG,), settings=Settings(max_prefill_chunk_tokens=8), objectives=(SOON,)),
        {"max_prefill_chunk_tokens": 512},
    ),
    "token_budget": (
        Plant(rate_rps=2.0, klasses=(LONG,), settings=Settings(max_num_batched_tokens=12), objectives=(SOON,)), None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("key", RULED)
def test_setting_that_is_wrong_is_named_with_its_remedy(tmp_path, key):
    plant, settings = RULED[key]
    first = diagnose(synthetic_run(tmp_path / "run", plant=plant, requests=40)).findings[0]
    assert first.key == key and first.kind == "policy"
    assert settings is None or first.change.settings == settings
    if key == "token_budget":  # computed from the fixed cost of a step, and not doubled blindly
        assert first.change.settings["max_num_batched_tokens"] > 24


def test_errors_that_differ_in_a_number_are_one_loss(tmp_path):
    run = synthetic_run(tmp_path / "run", requests=40)
    table = pd.read_parquet(run.path / "client.parquet")
    for row in range(12):
        table.at[row, "status"], table.at[row, "error"] = "error", f"HTTP 429: try again in {row} s"
    table.to_parquet(run.path / "client.parquet")
    assert [each.missed for each in losses(read_evidence(run))] == [12]


def test_limit_of_a_tenant_is_told_from_the_queue(tmp_path):
    run = synthetic_run(tmp_path / "run", requests=60)
    table = pd.read_parquet(run.path / "client.parquet")
    for row in range(30):
        table.at[row, "status"] = "error"
        table.at[row, "error"] = f"HTTP 429: tenant 'a' (tier free) has reached requests_per_minute=6; in {row} s"
    table.to_parquet(run.path / "client.parquet")
    assert diagnose(run).findings[0].key == "rate_limit"


def test_long_answers_at_the_usual_speed_are_the_workload(tmp_path):
    klasses = (Klass(weight=0.8, output_tokens=20), Klass(weight=0.2, output_tokens=400, spread=0.05))
    patient = [{"klass": "all", "ttft_ms": None, "tpot_ms": None, "e2e_ms": 2_500.0, "source": "chosen for the test"}]
    run = synthetic_run(tmp_path / "run", plant=Plant(rate_rps=1.0, klasses=klasses), objectives=patient,
                        requests=60)  # fmt: skip
    first = diagnose(run).findings[0]
    assert first.key == "long_outputs" and first.kind == "workload" and first.lifecycles[0] == "token"


def test_capacity_knows_the_token_budget(tmp_path):
    facts = read_evidence(synthetic_run(tmp_path / "run", plant="small_budget", requests=60))
    roomy = replace(facts, engine=facts.engine | {"max_num_batched_tokens": 512})
    assert load(facts) > 1.2 * load(roomy)


@pytest.mark.parametrize(("lag", "bound", "unsafe"), [(44.0, 4_700.0, False), (300.0, 400.0, True)])
def test_lateness_makes_a_verdict_unsafe_only_where_it_could_change_it(tmp_path, lag, bound, unsafe):
    objectives = [{"klass": "all", "ttft_ms": bound, "tpot_ms": None, "e2e_ms": None, "source": "chosen for the test"}]
    run = synthetic_run(tmp_path / "run", objectives=objectives, requests=60)
    late_ms(run, lag)
    run.update_meta(valid=False, invalid_reasons=[f"the load generator sent late: p99 {lag} ms"], load_reasons=[])
    diagnosis = diagnose(run)
    assert (diagnosis.state == "invalid") is unsafe and bool(diagnosis.unsafe) is unsafe
    assert "unknown" not in {check.status for check in diagnosis.checks[:1]}


def test_requests_that_would_be_late_all_the_same_are_counted(tmp_path):
    run = synthetic_run(tmp_path / "run", requests=60)
    on_time = read_evidence(run).rows.ttft_ms.astype("float64")
    bound = float(on_time.quantile(0.95))  # fewer than the tolerated tenth miss it
    run.update_meta(objectives=[{"klass": "all", "ttft_ms": bound, "source": "chosen for the test"}])
    late_ms(run, 300.0)
    facts = read_evidence(run)
    (sentence,) = lateness(facts, excesses(facts)).unsafe
    assert f"sent on time, {(on_time > bound).mean():.0%}" in sentence


def test_cause_of_an_invalid_run_is_named(tmp_path):
    run = synthetic_run(tmp_path / "run", plant="small_batch_cap", requests=60)
    late_ms(run, 5.0)
    run.update_meta(valid=False, invalid_reasons=["the load generator sent late: p99 5 ms"], load_reasons=[])
    diagnosis = diagnose(run)
    assert diagnosis.state == "degraded" and diagnosis.findings[0].key == "batch_cap"
    assert "sent late" in diagnosis.headline and not lateness(read_evidence(run), []).no_verdict


@pytest.fixture(scope="module")
def capped(tmp_path_factory):
    return synthetic_run(tmp_path_factory.mktemp("capped") / "run", plant="small_batch_cap", requests=60)


@pytest.mark.parametrize("level", LEVELS[:-1])  # "all" reads what "kernels" does, of this run
def test_level_reads_no_more_than_it_may(capped, level):
    run, facts = capped, read_evidence(capped, level)
    rank = LEVELS.index(level)
    has_steps = isinstance(facts, Records) and facts.steps is not None
    assert has_steps is (rank >= LEVELS.index("steps"))
    assert is_joined(facts) is (rank >= LEVELS.index("requests"))
    assert bool(facts.engine) is (rank >= LEVELS.index("requests"))
    diagnosis = diagnose(run, level=level)
    assert diagnosis.level == level
    if rank >= LEVELS.index("steps"):
        assert diagnosis.findings[0].key == "batch_cap"


def test_record_of_a_planted_fault_is_read_at_no_level(tmp_path):
    run = synthetic_run(tmp_path / "run", requests=20)
    engine = run.meta()["engine"] | {"faults": "slow_host:ms=9", "served": {"engine": {"faults": "slow_host:ms=9"}}}
    scenario = {"name": "planted", "engine": {"faults": "slow_host:ms=9"}}
    run.update_meta(engine=engine, scenario=scenario, fault={"plant": "slow_host"})
    assert "slow_host" not in str(view_at_level(run, "all").meta())
    assert "faults" not in read_evidence(run).engine
