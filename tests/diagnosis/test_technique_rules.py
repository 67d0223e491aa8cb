"""Techniques of the engine as causes and as fixes: each is named from what was measured, and not without it."""

from types import SimpleNamespace

import msgspec
import pytest

from sojourn.diagnosis.diagnose import diagnose
from sojourn.diagnosis.evidence import Work, read_evidence
from sojourn.diagnosis.excess import excesses
from sojourn.diagnosis.proposals import proposals
from sojourn.diagnosis.statements import prefixes
from sojourn.metrics.compute.speed_run import entry_of_run
from tests.metrics.sampled_machine import known, with_requests
from tests.metrics.synthetic import synthetic_run

TIGHT = [{"klass": "all", "tpot_ms": 9.0, "source": "chosen for the tests"}]


@pytest.fixture(scope="module")
def normal(tmp_path_factory):
    run = known(synthetic_run(tmp_path_factory.mktemp("normal") / "run", requests=120, seed=3))
    return msgspec.structs.replace(entry_of_run(run, run.meta()), identity=1)


def held_as(entry, weights: str, speedup: float):
    """The entry of a server whose matrices have another format and whose steps are so many times as fast."""
    step_ns = [None if ns is None else ns / speedup for ns in entry.step_ns]
    return msgspec.structs.replace(
        entry, identity=entry.identity + 1, step_ns=step_ns, settings=entry.settings | {"weights": weights}
    )


def proposed(run) -> dict[str, object]:
    facts = read_evidence(run)
    return {found.key: found for excess in excesses(facts) for found in proposals(facts, excess)}


def test_a_model_that_is_too_slow_is_offered_the_weights_that_were_measured(tmp_path, normal):
    made = synthetic_run(tmp_path / "run", requests=120, objectives=TIGHT)
    run = known(made, [normal, held_as(normal, "int8", 1.6)])
    found = next(each for each in diagnose(run).findings if each.key == "slow_decode")
    assert "weights=int8" in found.fix.change
    assert any("with weights=int8 in place of float32" in fact.statement for fact in found.evidence)
    slower = known(made, [normal, held_as(normal, "int8", 0.9)])
    assert "weights=int8" not in next(f for f in diagnose(slower).findings if f.key == "slow_decode").fix.change


@pytest.mark.parametrize(
    ("own", "chosen", "is_named"), [("int4", True, True), ("int4", False, False), ("float32", True, False)]
)
def test_chosen_weights_are_the_cause_where_more_exact_ones_are_faster(tmp_path, normal, own, chosen, is_named):
    run = known(synthetic_run(tmp_path / "run", requests=120, objectives=TIGHT), weights=own)
    mine = msgspec.structs.replace(normal, settings=normal.settings | {"weights": own})
    run = known(run, [mine, held_as(mine, "int8", 1.4)], weights=own)
    if chosen:
        run.update_meta(engine=(run.meta()["engine"] or {}) | {"weights": own})
    found = proposed(run)
    assert ("slow_format" in found) is is_named
    if is_named:
        assert found["slow_format"].settings == {"weights": "int8"}
        assert found["slow_format"].fixes[0].device_speed == pytest.approx(1.4, rel=0.02)


@pytest.mark.parametrize(("plant", "is_named"), [("healthy", True), ("tiny_kv", False)])
def test_wider_keys_and_values_are_no_fix_where_requests_wait_for_blocks(tmp_path, normal, plant, is_named):
    run = known(synthetic_run(tmp_path / "run", plant=plant, requests=120, objectives=TIGHT))
    mine = msgspec.structs.replace(normal, settings=normal.settings | {"kv_cache_dtype": "int8"})
    wider = msgspec.structs.replace(
        held_as(mine, "float32", 1.4), settings=normal.settings | {"kv_cache_dtype": "auto"}
    )
    engine = run.meta()["engine"] | {"kv_cache_dtype": "int8"}
    engine["served"]["engine"] |= {"kv_cache_dtype": "int8"}
    run = known(run, [mine, wider])
    run.update_meta(engine=engine)
    assert ("slow_format" in proposed(run)) is is_named


def evicted(records) -> None:
    """Every prompt but the first begins with 960 known tokens. They were evicted, and LRU would have kept them."""
    records.requests[:] = [
        msgspec.structs.replace(
            record, infinite_hit_tokens=960, resized_hit_tokens=[0, 960, 960, 960, 960],
            prefix_outcomes={"miss_evicted": 960, "miss_cold": record.prompt_tokens - 960},
        )
        if place else record
        for place, record in enumerate(records.requests)
    ]  # fmt: skip


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_an_eviction_policy_is_the_cause_where_lru_would_have_kept_what_it_gave_away(tmp_path, policy):
    """The curve of pool sizes is that of LRU, whichever policy runs: at the pool's own size it says what LRU hits."""
    run = synthetic_run(tmp_path / "run", plant="prefix_cache_off", keep=evicted)
    engine = run.meta()["engine"]
    engine |= {"prefix_caching": True, "eviction_policy": policy}
    engine["served"]["engine"] |= {"prefix_caching": True, "eviction_policy": policy}
    run.update_meta(engine=engine)
    first = diagnose(run).findings[0]
    assert (first.key == "eviction_policy") is (policy != "lru")
    if policy != "lru":
        assert first.lifecycles[0] == "memory" and "eviction_policy=lru" in first.fix.change


def test_prompts_that_are_spared_spare_more_of_the_waits_the_fuller_the_server_was(monkeypatch):
    """As ρ / (1 - ρ) does; of their own time the same part."""
    facts, shares = SimpleNamespace(work=Work(800.0, 800.0, 20.0, 400.0)), []
    for full in (0.3, 0.6, 0.9):
        at = {800.0: full, 400.0: full / 2}
        monkeypatch.setattr(prefixes, "load", lambda facts, work=None, at=at: at[(work or facts.work).computed_tokens])
        claims = prefixes.claims_of_spared(facts, 0.5)
        shares.append(claims["request.queue"])
        assert claims["compute.prefill"] == 0.5
    assert shares == sorted(shares) and shares[0] > 0.5 and shares[-1] == pytest.approx(1 - (0.45 / 0.55) / 9)


def test_a_policy_that_lru_would_beat_is_not_mended_by_a_larger_pool(tmp_path):
    """The curve is of LRU: what it hits at the pool's own size is no gain of another size."""
    claims = {}
    for policy in ("lru", "lfu"):
        run = synthetic_run(tmp_path / policy, plant="prefix_cache_off", keep=evicted)
        engine = run.meta()["engine"] | {"prefix_caching": True, "eviction_policy": policy}
        engine["served"]["engine"] |= {"prefix_caching": True, "eviction_policy": policy}
        run.update_meta(engine=engine)
        claims[policy] = proposed(run)["cache_thrash"].claims["compute.prefill"]
    assert claims["lru"] > 0.5 and claims["lfu"] < 0.1


@pytest.mark.parametrize(("chosen", "settings"), [
    ("num_kv_blocks", {"num_kv_blocks"}), ("kv_cache_gib", {"kv_cache_dtype"}), ("int8", {"attention_window"}),
])  # fmt: skip
def test_a_pool_that_was_given_in_bytes_gets_more_tokens_in_the_same_bytes(tmp_path, chosen, settings):
    run = known(synthetic_run(tmp_path / "run", plant="tiny_kv", requests=120))
    engine = run.meta()["engine"]
    if chosen != "num_kv_blocks":
        engine["kv_cache_gib"] = engine["num_kv_blocks"] / 1024
        del engine["num_kv_blocks"]
    if chosen == "int8":  # and so few tokens a step that a window frees most of a long request's blocks
        engine |= {"kv_cache_dtype": "int8", "max_num_batched_tokens": 16}
        engine["served"]["engine"] |= {"kv_cache_dtype": "int8", "max_num_batched_tokens": 16}
        run = with_requests(run, prompt_tokens=lambda rows: rows.prompt_tokens + 3000)
    run.update_meta(engine=engine)
    fixes = proposed(run)["kv_pool"].fixes
    assert set(fixes[0].settings) == settings
    assert (fixes[0].kv_scale > 1) is (chosen != "num_kv_blocks")


def with_drafts(run, accepted_of_ten: int, proposing: float):
    """The run with speculation: each output token cost ten drafts, and the proposer took a share of the decoding."""
    rows = run.table("requests")
    outputs = rows.output_tokens.astype("int64")
    run = with_requests(
        run, drafted_tokens=lambda _: 10 * outputs // 2, accepted_tokens=lambda _: accepted_of_ten * outputs // 20,
        rejected_ns=lambda rows: (rows.ledger_compute_decode_ns * (10 - accepted_of_ten) / 20).astype("int64"),
        ledger_compute_draft_ns=lambda rows: (rows.ledger_compute_decode_ns * proposing).astype("int64"),
    )  # fmt: skip
    run.update_meta(engine=(run.meta()["engine"] or {}) | {"speculation": "draft-model"})
    return run


@pytest.mark.parametrize(("accepted", "is_named"), [(1, True), (9, False)])
def test_drafts_that_are_seldom_accepted_are_named(tmp_path, accepted, is_named):
    made = synthetic_run(tmp_path / "run", requests=120, objectives=TIGHT)
    found = proposed(with_drafts(made, accepted, 0.2))
    assert ("rejected_drafts" in found) is is_named
    if is_named:
        assert found["rejected_drafts"].settings == {"speculation": "none"}
    assert "no_drafts" not in found, "speculation is on"


@pytest.mark.parametrize(("steps_for_ten", "is_named"), [(3, True), (9, False)])
def test_output_that_repeats_itself_is_offered_speculation(tmp_path, steps_for_ten, is_named):
    made = synthetic_run(tmp_path / "run", requests=120, objectives=TIGHT)
    run = with_requests(made, lookup_steps=lambda rows: (rows.output_tokens * steps_for_ten / 10).astype("int64"))
    found = proposed(run)
    assert ("no_drafts" in found) is is_named and "rejected_drafts" not in found
    if is_named:
        assert found["no_drafts"].settings == {"speculation": "ngram"}


@pytest.mark.parametrize(("slots", "is_named"), [(1, True), (4, False)])
def test_waiting_for_the_slot_of_an_adapter_is_named(tmp_path, slots, is_named):
    made = synthetic_run(tmp_path / "run", plant="small_batch_cap")
    run = with_requests(
        made, adapter=lambda rows: [f"a{place % 4}" for place in range(len(rows))], adapter_loads=lambda _: 1,
        waits=lambda rows: [{"adapter": 600, "batch_cap": 400}] * len(rows),
    )  # fmt: skip
    engine = run.meta()["engine"] | {"max_loras": slots}
    engine["served"]["engine"]["max_loras"] = slots
    run.update_meta(engine=engine)
    found = proposed(run)
    assert ("adapter_slots" in found) is is_named
    if is_named:
        assert found["adapter_slots"].settings == {"max_loras": 4}
        assert found["adapter_slots"].claims["request.queue"] == pytest.approx(0.6)


@pytest.mark.parametrize(("again_ms", "is_named"), [(50, True), (600, False)])
def test_a_tier_that_is_slower_than_computing_again_is_named(tmp_path, again_ms, is_named):
    made = synthetic_run(tmp_path / "run", plant="slow_encode", requests=60)  # its time becomes that of reads
    run = with_requests(
        made, load_decision=lambda rows: ["load"] * len(rows), load_predicted_ns=lambda _: 10_000_000,
        load_ns=lambda rows: rows.ledger_token_encode_ns, recompute_predicted_ns=lambda _: again_ms * 1_000_000,
        ledger_memory_load_ns=lambda rows: rows.ledger_token_encode_ns,
        ttft_memory_load_ns=lambda rows: rows.ttft_token_encode_ns,
        ledger_token_encode_ns=lambda _: 0, ttft_token_encode_ns=lambda _: 0,
    )  # fmt: skip
    assert ("slow_kv_tier" in proposed(run)) is is_named


@pytest.mark.parametrize(("tokens", "is_named"), [(16, True), (1_000_000, False)])
def test_a_disk_that_no_sound_disk_is_as_slow_as_is_named_though_computing_is_slower_still(tmp_path, tokens, is_named):
    made = known(synthetic_run(tmp_path / "run", plant="slow_encode", requests=60))
    run = with_requests(
        made, load_decision=lambda rows: ["load"] * len(rows), recompute_predicted_ns=lambda _: 900_000_000,
        loaded_tokens=lambda rows: [{"disk": tokens}] * len(rows), load_ns=lambda rows: rows.ledger_token_encode_ns,
        ledger_memory_load_ns=lambda rows: rows.ledger_token_encode_ns,
        ttft_memory_load_ns=lambda rows: rows.ttft_token_encode_ns,
        ledger_token_encode_ns=lambda _: 0, ttft_token_encode_ns=lambda _: 0,
    )  # fmt: skip
    found = proposed(run)
    assert ("slow_kv_tier" in found) is is_named
    if is_named:
        assert found["slow_kv_tier"].settings["kv_host_gib"] >= 2
