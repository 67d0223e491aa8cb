"""A finding names through whom requests waited, for what, and why a prompt was not in the cache."""

from dataclasses import replace

import msgspec
import pytest

from sojourn.diagnosis.diagnose import diagnose
from sojourn.diagnosis.evidence import read_evidence
from sojourn.diagnosis.verdict import Diagnosis
from sojourn.metrics.run.directory import RunDirectory
from tests.metrics.synthetic import PLANTS, Klass, synthetic_run


def statements(diagnosis: Diagnosis, supports: bool | None = None) -> str:
    """All evidence of the first finding."""
    facts = diagnosis.findings[0].evidence
    return "\n".join(fact.statement for fact in facts if supports is None or fact.supports is supports)


def update_scenario(run: RunDirectory, **changes) -> None:
    """Replaces run.json's scenario, so that nothing but the measurement can tell."""
    scenario = run.meta()["scenario"] | changes
    run.update_meta(scenario=scenario)


def test_those_whom_late_requests_waited_for_are_named_by_tenant_class_and_length(tmp_path):
    """Bulk holds the places with long answers; the others wait for a place."""

    def tenants(records) -> None:
        records.requests[:] = [
            msgspec.structs.replace(record, tenant="bulk" if record.output_tokens > 80 else "shop")
            for record in records.requests
        ]

    bulky = replace(PLANTS["small_batch_cap"], rate_rps=9.0)
    run = synthetic_run(tmp_path / "run", plant=bulky, keep=tenants)
    assert "of tenant shop" in statements(diagnose(run), supports=True)
    assert "of the waiting of late requests" in statements(diagnose(run))


def test_group_is_not_named_where_all_requests_are_of_one(tmp_path):
    alike = replace(PLANTS["small_batch_cap"], klasses=(Klass(prompt_tokens=60, spread=0.01),))
    diagnosis = diagnose(synthetic_run(tmp_path / "run", plant=alike))
    assert diagnosis.findings[0].object == "batch cap (max_num_seqs)"
    assert "of the waiting of late requests" not in statements(diagnosis)


def outcomes(records, kind: str) -> None:
    """The shared beginning of every prompt but the first was known: hit, or missed for a cause."""
    recorded = []
    for place, record in enumerate(records.requests):
        shared = 960 if place else 0
        cold = record.prompt_tokens - shared
        recorded.append(
            msgspec.structs.replace(
                record, prefix_outcomes={kind: shared, "miss_cold": cold} if shared else {"miss_cold": cold},
                infinite_hit_tokens=shared, resized_hit_tokens=[0, 0, shared, shared, shared],
            )
        )  # fmt: skip
    records.requests[:] = recorded


def test_measured_misses_replace_what_the_scenario_declares(tmp_path):
    """Nothing is declared to be shared; the shadow index has seen that it was, and the cache was off."""
    run = synthetic_run(tmp_path / "run", plant="prefix_cache_off", keep=lambda r: outcomes(r, "miss_disabled"))
    update_scenario(run, workload={"classes": []})
    diagnosis = diagnose(run)
    assert diagnosis.findings[0].object == "prefix cache"
    assert "a cache without eviction would have hit 9" in statements(diagnosis, supports=True)
    assert "would have been hits if the cache were on" in statements(diagnosis, supports=True)


def test_evicted_prefixes_ask_for_a_larger_pool_and_tell_what_it_would_hit(tmp_path):
    run = synthetic_run(tmp_path / "run", plant="prefix_cache_off", keep=lambda r: outcomes(r, "miss_evicted"))
    update_scenario(run, workload={"classes": []})
    engine = run.meta()["engine"]
    engine["prefix_caching"] = True
    engine["served"]["engine"]["prefix_caching"] = True
    run.update_meta(engine=engine)
    found = diagnose(run).findings[0]
    assert found.object == "prefix cache" and "num_kv_blocks" in found.fix.change
    assert "had been in the cache and were evicted" in statements(diagnose(run), supports=True)
    assert "a cache without eviction would have hit" in statements(diagnose(run), supports=True)


def test_waits_by_reason_are_those_of_the_records_where_they_tell(tmp_path):
    """The steps say batch cap; the requests' own books say policy, and are believed."""

    def policy(records) -> None:
        records.requests[:] = [
            msgspec.structs.replace(record, waits={"policy": 900, "step": 5_000, "batch_cap": 100})
            for record in records.requests
        ]

    run = synthetic_run(tmp_path / "run", plant="small_batch_cap", requests=60, keep=policy)
    assert read_evidence(run).waits == {"policy": 0.9, "batch_cap": 0.1}
    assert read_evidence(synthetic_run(tmp_path / "old", plant="small_batch_cap", requests=60)).waits["batch_cap"] > 0.9


def test_residual_is_separate_for_steps_bound_by_arithmetic_and_by_memory(tmp_path):
    def decodes_slow(records) -> None:
        records.steps[:] = [
            step.with_columns(predicted_ns=None if step.predicted_ns is None else step.device_ns // 3)
            if "prefill" not in step.kinds
            else step
            for step in records.steps
        ]

    facts = read_evidence(synthetic_run(tmp_path / "run", requests=80, keep=decodes_slow))
    assert facts.steps.slowdown_without == pytest.approx(3, rel=0.05)
    assert facts.steps.slowdown_with_prompts == pytest.approx(1, rel=0.1)
    slow = diagnose(synthetic_run(tmp_path / "slow", plant="slow_device"))
    assert "both alike: the whole device" in statements(slow, supports=True)
