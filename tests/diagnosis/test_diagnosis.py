"""What was planted is what is found: symptom, lifecycle, kind; and nothing where nothing was planted."""

from dataclasses import replace
from functools import cache

import msgspec
import pytest

from sojourn.diagnosis.diagnose import diagnose
from sojourn.diagnosis.symptoms import SYMPTOMS
from sojourn.diagnosis.verdict import NEEDS_SERVER_RECORDS, RECORD_THE_SERVER, Diagnosis, without_finding
from sojourn.metrics.ledger import LIFECYCLES
from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.run.server_alone import MARK, SERVER_ALONE
from tests.further import further
from tests.metrics.simulated_server import Device, S, Settings
from tests.metrics.synthetic import PLANTS, Klass, Plant, synthetic_pair, synthetic_run

SEEDS = (0, pytest.param(1, marks=pytest.mark.slow))  # half a minute for claims of which each has many plants
PLANTED = [name for name, plant in PLANTS.items() if plant.symptom]


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """(plant, seed) → its diagnosis, computed once: simulating is most of the cost."""

    @cache
    def diagnosed(plant: str, seed: int) -> Diagnosis:
        return diagnose(synthetic_run(tmp_path_factory.mktemp("runs") / "run", plant=plant, seed=seed))

    return lambda plant, seed=0: diagnosed(plant, seed)


def status(diagnosis: Diagnosis, symptom: str) -> str:
    return next(check.status for check in diagnosis.checks if check.symptom == symptom)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("plant", PLANTED)
def test_planted_cause_is_found(planted, plant, seed):
    truth = PLANTS[plant]
    diagnosis = planted(plant, seed)
    first = diagnosis.findings[0]
    assert diagnosis.state == truth.state
    assert status(diagnosis, truth.symptom) == "present"
    assert first.lifecycles[0] == truth.lifecycle and first.kind == truth.kind
    assert diagnosis.bottleneck == (truth.lifecycle if truth.lifecycle in LIFECYCLES else None)
    assert any(fact.supports for fact in first.evidence)
    assert first.probe.if_cause != first.probe.if_rival


OBJECTS = {
    "tiny_kv": "KV block pool",
    "long_beside_chat": "token budget of a step",
    "documents_beside_as_many_chats": "token budget of a step",
    "small_batch_cap": "batch cap (max_num_seqs)",
    "prefix_cache_off": "prefix cache",
    "static_batching": "admission policy",
    "slow_host": "host side of the loop",
    "slow_device": "device",
    "slow_stream": "front process",
    "burst": "arrivals",
    "slow_encode": "tokeniser",
    "slow_network": "network path between client and server",
    "slow_model": "decode step",
    "small_budget": "token budget of a step",
    "overload": "offered load",
    "overload_behind_cap": "offered load",
}


@pytest.mark.parametrize(("plant", "thing"), OBJECTS.items())
def test_planted_object_is_named(planted, plant, thing):
    assert planted(plant).findings[0].object.startswith(thing)


@pytest.mark.parametrize("seed", [0, *further(1, 2)])
def test_healthy_run_has_no_finding(planted, seed):
    diagnosis = planted("healthy", seed)
    assert diagnosis.state == "healthy" and not diagnosis.findings and diagnosis.bottleneck is None
    assert {check.status for check in diagnosis.checks[:4]} == {"absent"}


def test_few_requests_are_not_called_healthy(tmp_path):
    few, enough = (diagnose(synthetic_run(tmp_path / str(n), requests=n)) for n in (19, 20))
    assert few.state == "inconclusive" and "100% of 19 requests" in few.headline and "measure 20" in few.headline
    assert enough.state == "healthy"


def test_growing_queue_is_named_unless_the_rate_was_meant_to_grow(tmp_path):
    patient = [{"klass": "all", "ttft_ms": 1e7, "tpot_ms": None, "e2e_ms": None, "source": "chosen for the test"}]
    run = synthetic_run(tmp_path / "run", plant="overload", objectives=patient)
    diagnosis = diagnose(run)
    assert diagnosis.goodput[0].attainment == 1 and diagnosis.results.steady.queue_grows
    assert diagnosis.state == "inconclusive" and "the queue grows" in diagnosis.headline
    run.update_meta(scenario={"arrivals": {"process": "ramp"}})
    diagnosis = diagnose(run)
    assert diagnosis.state == "healthy" and "the queue grows" in diagnosis.headline


@pytest.mark.parametrize("seed", SEEDS)
def test_late_load_generator_makes_a_run_invalid(planted, seed):
    diagnosis = planted("client_lag", seed)
    assert diagnosis.state == "invalid"
    assert "the load generator sent late by 300 ms" in diagnosis.headline
    assert "had all requests been sent on time" in diagnosis.unsafe[0]
    assert status(diagnosis, "high_ttft") == "present"  # what was measured is said all the same
    assert diagnosis.results.steady.verdict == "cannot tell"


@pytest.mark.parametrize(
    "plant", ["tiny_kv", "small_batch_cap", *further("small_budget", "prefix_cache_off", "long_beside_chat")]
)
def test_suggested_setting_mends_what_was_planted(tmp_path, planted, plant):
    """The fix is applied as it is written, and the same arrivals are served again."""
    before = planted(plant)
    key, value = before.findings[0].fix.change.split(",")[0].split(" ")[0].split("=")
    settings = replace(PLANTS[plant].settings, **{key: value == "true" if value.isalpha() else int(value)})
    after = diagnose(synthetic_run(tmp_path / "after", plant=replace(PLANTS[plant], settings=settings)))
    assert after.goodput[0].attainment > before.goodput[0].attainment + 0.1
    assert after.state == "healthy"
    assert f"--set {key}={value}" in before.findings[0].probe.command


def test_overload_is_not_mended_by_the_settings_that_mend_others(tmp_path):
    roomy = Settings(max_num_seqs=512, num_kv_blocks=20_000)
    plant = replace(PLANTS["overload"], settings=roomy)
    assert diagnose(synthetic_run(tmp_path / "run", plant=plant)).state == "overloaded"


def test_large_batches_are_not_a_fault_of_the_device(tmp_path):
    plant = Plant(rate_rps=18.0, device=Device(token_ns=150_000))
    diagnosis = diagnose(synthetic_run(tmp_path / "run", plant=plant))
    assert not any(finding.kind == "fault" for finding in diagnosis.findings)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_ramp_is_a_rate_that_changes_and_not_bursts(tmp_path, seed):
    ramp = replace(PLANTS["burst"], arrival_cv=1.0, rise=60.0)
    run = synthetic_run(tmp_path / "ramp", plant=ramp, seed=seed)
    found = diagnose(run).findings[0]
    assert found.object == "arrivals" and "the rate of arrivals changes (up to " in found.cause
    against = diagnose(synthetic_run(tmp_path / "even", plant=replace(ramp, rise=1.0), seed=seed), run)
    assert not any("bursts" in each.cause for each in (found, *against.findings))


@pytest.mark.parametrize("seed", SEEDS)
def test_product_that_sends_bursts_explains_its_latency_against_the_benchmark(tmp_path, seed):
    benchmark, product = synthetic_pair(tmp_path, pair="benchmark_good_product_bad", seed=seed)
    for first, second in ((benchmark, product), (product, benchmark)):
        diagnosis = diagnose(first, second)
        assert status(diagnosis, "product_latency_poor") == "present"
        found = next(f for f in diagnosis.findings if f.symptom == "product_latency_poor")
        assert found.kind == "workload" and found.lifecycles == ["request"] and "bursts" in found.cause


@pytest.mark.parametrize("seed", SEEDS)
def test_more_devices_are_told_from_devices_that_help(tmp_path, seed):
    useless = diagnose(*synthetic_pair(tmp_path / "a", pair="devices_do_not_help", seed=seed))
    useful = diagnose(*synthetic_pair(tmp_path / "b", pair="devices_help", seed=seed))
    assert status(useless, "devices_do_not_help") == "present" and status(useful, "devices_do_not_help") == "absent"
    found = next(f for f in useless.findings if f.symptom == "devices_do_not_help")
    assert found.lifecycles == ["compute"] and "compute.host" in found.cause


def test_comparison_names_the_run_that_lacks_server_records(tmp_path):
    seen = synthetic_run(tmp_path / "seen", plant="healthy")
    unseen = foreign(tmp_path, plant="healthy")
    for pair in ((seen, unseen), (unseen, seen)):
        reason = diagnose(*pair).checks[5].reason
        assert reason.startswith("no server records in run; next: the same scenario")


def test_two_run_symptoms_of_one_run_name_the_command_that_tells(planted):
    diagnosis = planted("healthy")
    for check in diagnosis.checks[4:]:
        assert check.status == "unknown" and "--against" in check.reason


def test_shares_sum_to_one_and_every_ledger_closes(planted):
    diagnosis = planted("tiny_kv")
    assert sum(diagnosis.ledger_share.values()) == pytest.approx(1)
    assert sum(diagnosis.ttft_share.values()) == pytest.approx(1)
    assert sum(diagnosis.lifecycle_share.values()) == pytest.approx(1)
    assert set(diagnosis.lifecycle_share) == {*LIFECYCLES, "client"}
    assert diagnosis.closure.closed == diagnosis.closure.joined == 200


def test_diagnosis_survives_the_way_to_disk_and_writes_nothing_itself(tmp_path):
    run = synthetic_run(tmp_path / "run", plant="tiny_kv")
    before = sorted(path.name for path in run.path.iterdir())
    diagnosis = diagnose(run)
    assert sorted(path.name for path in run.path.iterdir()) == before
    assert [check.symptom for check in diagnosis.checks] == [symptom.key for symptom in SYMPTOMS]
    assert msgspec.json.decode(msgspec.json.encode(diagnosis), type=Diagnosis) == diagnosis


# Runs that lack something: a clear state, and no crash.


def foreign(tmp_path, **changes) -> RunDirectory:
    def forget(records):
        records.requests.clear()
        records.steps.clear()

    return synthetic_run(tmp_path / "run", keep=forget, **changes)


def test_foreign_server_gets_goodput_and_is_told_what_cannot_be_seen(tmp_path):
    diagnosis = diagnose(foreign(tmp_path, plant="overload"))
    assert diagnosis.state == "overloaded" and diagnosis.findings[0].confidence < 0.5
    assert diagnosis.goodput[0].sent == 200 and diagnosis.ledger_share["unaccounted"] > 0.9
    assert any("cannot be seen" in warning for warning in diagnosis.warnings)
    assert status(diagnosis, "high_ttft") == "present" and status(diagnosis, "vram_fills_quickly") == "unknown"


def test_what_a_foreign_server_hides_is_said_with_the_next_step(tmp_path):
    def delay_some(records):
        """Every third answer comes 3 s later: a trace that no cause of the client's records leaves."""
        records.requests.clear()
        records.steps.clear()
        for place in range(0, len(records.client), 3):
            one = records.client[place]
            records.client[place] = msgspec.structs.replace(
                one, first_token_ns=one.first_token_ns + 3 * S, last_byte_ns=one.last_byte_ns + 3 * S,
                chunk_ns=[ns + 3 * S for ns in one.chunk_ns],
            )  # fmt: skip

    diagnosis = diagnose(synthetic_run(tmp_path / "run", keep=delay_some))
    assert NEEDS_SERVER_RECORDS in diagnosis.headline
    assert without_finding(diagnosis).startswith("The cause cannot be known without the server's records: replay with")
    low = next(check for check in diagnosis.checks if check.symptom == "low_device_utilisation")
    assert RECORD_THE_SERVER in low.reason


def test_foreign_server_within_its_objectives_is_healthy(tmp_path):
    assert diagnose(foreign(tmp_path, plant="healthy")).state == "healthy"


@pytest.mark.parametrize("table", ["client", "requests", "steps"])
def test_run_without_one_table_has_a_state(tmp_path, table):
    run = synthetic_run(tmp_path / "run", plant="tiny_kv", keep=lambda records: getattr(records, table).clear())
    assert diagnose(run).state in ("inconclusive", "degraded")


def test_run_of_a_server_alone_is_diagnosed_from_the_servers_own_stamps(tmp_path):
    both = diagnose(synthetic_run(tmp_path / "both", plant="small_batch_cap", requests=80))
    run = synthetic_run(
        tmp_path / "run", plant="small_batch_cap", requests=80, keep=lambda records: records.client.clear()
    )
    run.update_meta(valid=False, invalid_reasons=[SERVER_ALONE])
    diagnosis = diagnose(run)
    assert [each.key for each in diagnosis.findings] == [each.key for each in both.findings]
    assert diagnosis.state == "degraded" and "no client" in diagnosis.headline and MARK in diagnosis.warnings
    assert diagnosis.closure.closed == diagnosis.closure.joined == 80
    assert diagnosis.goodput[0].attainment == both.goodput[0].attainment
    assert diagnosis.ledger_share["client.network"] == diagnosis.ledger_share["client.lag"] == 0
    assert not diagnosis.findings[0].probe.command  # nobody can repeat what clients sent


def test_empty_run_is_inconclusive(tmp_path):
    run = synthetic_run(tmp_path / "run", requests=3, keep=lambda r: (r.client.clear(), r.steps.clear()))
    assert diagnose(run).state == "inconclusive"


def test_run_of_failures_only_says_how_they_failed(tmp_path):
    diagnosis = diagnose(synthetic_run(tmp_path / "run", plant=Plant(failing_share=1.0)))
    assert diagnosis.state == "degraded" and "connection reset" in diagnosis.headline
    assert diagnosis.goodput[0].good == 0 and diagnosis.goodput[0].sent == 200


def test_refused_requests_of_an_overload_are_an_overload(tmp_path):
    plant = replace(PLANTS["overload_behind_cap"], settings=Settings(max_waiting=4))
    diagnosis = diagnose(synthetic_run(tmp_path / "run", plant=plant))
    assert diagnosis.state == "overloaded"
    assert any("429" in warning for warning in diagnosis.warnings)


def test_run_without_objectives_is_not_called_healthy(tmp_path):
    run = synthetic_run(tmp_path / "run")
    run.update_meta(objectives=[])
    diagnosis = diagnose(run)
    assert diagnosis.state == "inconclusive" and "objectives" in diagnosis.headline


def test_run_under_way_is_diagnosed_from_its_segments(tmp_path):
    run = synthetic_run(tmp_path / "run", plant="tiny_kv", compact=False)
    assert not (run.path / "client.parquet").exists()
    assert diagnose(run).findings[0].object == "KV block pool"


def test_classes_with_different_causes_get_a_finding_each(tmp_path):
    """Documents are slow by their own prompts, chat by the documents."""
    plant = replace(
        PLANTS["long_beside_chat"],
        klasses=(Klass(weight=0.85), Klass("document", 0.15, prompt_tokens=3000, output_tokens=2, spread=0.1)),
        objectives=(
            {"klass": "chat", "ttft_ms": 2000.0, "tpot_ms": 25.0, "source": "test"},
            {"klass": "document", "ttft_ms": 300.0, "source": "test"},
        ),
    )
    diagnosis = diagnose(synthetic_run(tmp_path / "run", plant=plant))
    objects = {finding.object for finding in diagnosis.findings}
    assert "prompt" in objects and any(each.startswith("token budget of a step") for each in objects)


def test_settings_that_the_server_alone_reports_are_defaults(tmp_path):
    run = synthetic_run(tmp_path / "run", plant="tiny_kv")
    engine = run.meta()["engine"]
    assert engine.pop("num_kv_blocks") == engine["served"]["engine"]["num_kv_blocks"]
    run.update_meta(engine=engine)
    found = diagnose(run).findings[0]
    assert found.object == "KV block pool" and found.kind == "capacity"


def test_request_that_misses_two_objectives_is_lost_once(planted):
    diagnosis = planted("burst")
    found, whole = diagnosis.findings[0], diagnosis.goodput[0]
    assert found.goodput_lost == pytest.approx(1 - whole.attainment)


def test_those_who_delay_the_others_are_named(planted):
    cause = planted("long_beside_chat").findings[0].cause
    assert "requests of document with" in cause and "prompt tokens" in cause
