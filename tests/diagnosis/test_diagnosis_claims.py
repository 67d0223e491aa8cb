"""What a diagnosis must not claim: causes against its own evidence, comparisons of unlike runs, health by halves."""

import io
import json
from dataclasses import replace

import msgspec
import pandas as pd
import pytest
from rich.console import Console

from sojourn.diagnosis.causes import overload
from sojourn.diagnosis.diagnose import diagnose
from sojourn.diagnosis.evidence import read_evidence
from sojourn.diagnosis.repeat import rerun
from sojourn.diagnosis.shares import shares
from sojourn.diagnosis.terminal.report import render
from sojourn.metrics.records import NO_END
from sojourn.metrics.run.directory import RunDirectory
from tests.further import further
from tests.metrics.simulated_server import Settings
from tests.metrics.synthetic import PAIRS, PLANTS, Plant, synthetic_run


def devices(first: RunDirectory, second: RunDirectory):
    return next(check for check in diagnose(first, second).checks if check.symptom == "devices_do_not_help")


def beside(run: RunDirectory, path, plant: Plant, **changes) -> RunDirectory:
    """Another run of the same load, under other settings."""
    changes = {"seed": run.meta()["seed"], **changes}
    return synthetic_run(path, plant=plant, name=run.meta()["scenario"]["name"], **changes)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> RunDirectory:
    return synthetic_run(tmp_path_factory.mktemp("small") / "run", plant=PAIRS["devices_help"][0], requests=60)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"settings": Settings(max_num_seqs=31), "threads": 8}, "differ in max_num_seqs, threads"),
        ({"settings": Settings(max_num_seqs=31)}, "differ in max_num_seqs;"),
        ({"settings": Settings(num_kv_blocks=9000), "threads": 8}, "differ in num_kv_blocks, threads"),
        ({"settings": Settings(num_kv_blocks=9000)}, "the smaller pool was never full"),
        ({}, "the same settings"),
        ({"rate_rps": 7.0, "threads": 8}, "different scenarios"),
    ],
)
def test_devices_are_not_compared_between_runs_that_differ_in_more_than_one_resource(tmp_path, small, change, words):
    other = beside(small, tmp_path / "run", replace(PAIRS["devices_help"][0], **change), requests=60)
    check = devices(small, other)
    assert check.status == "unknown" and words in check.reason


def test_devices_are_not_compared_between_seeds(tmp_path, small):
    other = beside(small, tmp_path / "run", PAIRS["devices_help"][1], requests=60, seed=5)
    assert devices(small, other).status == "unknown" and "seeds differ (0 and 5)" in devices(small, other).reason


def test_pool_that_was_full_counts_as_a_resource(tmp_path):
    short = synthetic_run(tmp_path / "a", plant="tiny_kv", name="kv")
    ample = synthetic_run(
        tmp_path / "b", plant=replace(PLANTS["tiny_kv"], settings=Settings(num_kv_blocks=128)), name="kv"
    )
    assert devices(short, ample).status == "absent"
    assert "num_kv_blocks" in devices(short, ample).reason


def test_slow_quarter_is_not_named_where_its_accounts_explain_next_to_nothing(tmp_path):
    capped = PLANTS["small_batch_cap"]
    plant = replace(capped, device=replace(capped.device, slowdown=1.35, slow_from=0.75))
    diagnosis = diagnose(synthetic_run(tmp_path / "run", plant=plant))
    assert diagnosis.findings[0].object == "batch cap (max_num_seqs)"
    for found in diagnosis.findings:
        against = sum(
            fact.value for fact in found.evidence if not fact.supports and "does not explain" in fact.statement
        )
        assert against < 0.7, found.cause


def lose(run: RunDirectory, failed: int, late: int, klass: str | None = None) -> None:
    """Of a healthy run, some requests fail, and some have their first token a second late."""
    table = pd.read_parquet(run.path / "client.parquet")
    rows = table.index if klass is None else table.index[table.klass == klass]
    for row in rows[:failed]:
        table.at[row, "status"] = "error"
        table.at[row, "error"] = "connection reset"
    for name in ("first_token_ns", "last_byte_ns"):
        table.loc[rows[failed : failed + late], name] += 1_000_000_000
    table.to_parquet(run.path / "client.parquet")


def test_failed_and_late_requests_count_together_against_health(tmp_path):
    run = synthetic_run(tmp_path / "run")
    lose(run, failed=18, late=18)  # of 200: 9 % each, and 18 % together
    diagnosis = diagnose(run)
    assert diagnosis.goodput[0].attainment == pytest.approx(0.82)
    assert diagnosis.state != "healthy"


def test_class_that_fails_is_not_hidden_by_the_others(tmp_path):
    both = PLANTS["long_beside_chat"].klasses
    few = tuple(replace(klass, prompt_tokens=120, output_tokens=40) for klass in both)
    run = synthetic_run(tmp_path / "run", plant=Plant(klasses=few))
    lose(run, failed=12, late=0, klass="document")
    diagnosis = diagnose(run)
    assert diagnosis.goodput[0].attainment > 0.9
    assert diagnosis.state == "degraded" and diagnosis.headline.startswith("Lost requests: 6%")
    assert diagnosis.findings[0].objective == "served: “connection reset” for document"


def all_at_once(path, plant: str) -> RunDirectory:
    """A benchmark: every request is due in the same nanosecond."""
    return synthetic_run(path, plant=replace(PLANTS[plant], rate_rps=1e9, arrival_cv=0.0), name="at once")


@pytest.mark.parametrize("plant", ["tiny_kv", *further("healthy", "small_batch_cap", "prefix_cache_off")])
def test_benchmark_with_all_requests_at_once_has_no_rate_and_no_load(tmp_path, plant):
    run = all_at_once(tmp_path / "run", plant)
    table = pd.read_parquet(run.path / "client.parquet")
    table["due_ns"] = table.due_ns.min()
    table.to_parquet(run.path / "client.parquet")
    product = synthetic_run(tmp_path / "product", plant=plant, name="product")
    for diagnosis in (diagnose(run), diagnose(run, product), diagnose(product, run)):
        text = json.dumps(msgspec.to_builtins(diagnosis))
        assert "Infinity" not in text and "NaN" not in text
        assert " 0.0 requests/s" not in text and "nan" not in text and "load / capacity is 0.00" not in text
        assert msgspec.json.decode(text, type=type(diagnosis)) == diagnosis


def test_probe_repeats_the_command_of_the_run_with_one_setting_replaced(tmp_path):
    run = synthetic_run(tmp_path / "run", requests=5)
    command = ["sojourn", "run", "my demo", "--set", "max_num_seqs=4", "--set", "threads=2", "--seed", "3"]
    run.update_meta(command=command)
    facts = read_evidence(run)
    assert rerun(facts) == "sojourn run 'my demo' --set max_num_seqs=4 --set threads=2 --seed 3"
    assert rerun(facts, max_num_seqs=8) == "sojourn run 'my demo' --set threads=2 --seed 3 --set max_num_seqs=8"
    run.update_meta(command=["sojourn", "load", "demo", "--base-url", "http://h"])
    assert rerun(read_evidence(run), max_num_seqs=8) == ""
    run.update_meta(command=None)
    assert rerun(read_evidence(run), threads=1) == ""  # no command of ours made it


def test_only_settings_that_were_named_count_as_chosen(tmp_path):
    facts = read_evidence(synthetic_run(tmp_path / "run", plant="tiny_kv", requests=5))
    assert facts.chosen == {"model", "threads", "num_kv_blocks"}
    assert facts.engine["block_size"] == 16 and facts.engine["num_kv_blocks"] == 64


def test_offenders_are_long_beside_the_late_though_half_of_all_prompts_are(tmp_path):
    found = diagnose(synthetic_run(tmp_path / "run", plant="documents_beside_as_many_chats")).findings[0]
    assert "requests of document with" in found.cause


def test_invalid_run_says_why(tmp_path):
    run = synthetic_run(tmp_path / "run", requests=30)
    run.update_meta(valid=False, invalid_reasons=["the server ended with exit code 9", "stopped with Ctrl-C"])
    diagnosis = diagnose(run)
    assert diagnosis.state == "invalid"
    assert "exit code 9; stopped with Ctrl-C" in diagnosis.headline


def test_lateness_is_judged_once_by_the_tool_that_made_the_run(tmp_path):
    run = synthetic_run(tmp_path / "run", plant="client_lag", requests=60)
    run.update_meta(valid=True, invalid_reasons=[])
    diagnosis = diagnose(run)
    assert diagnosis.state != "invalid"
    assert any("sent late" in warning for warning in diagnosis.warnings)


def test_device_that_is_slow_is_no_evidence_that_it_is_not_at_fault(tmp_path):
    busy = PLANTS["overload_behind_cap"]
    plant = replace(busy, device=replace(busy.device, slowdown=2.0, slow_from=0.5))
    facts = read_evidence(synthetic_run(tmp_path / "run", plant=plant))
    said = overload.read_records(facts, None).evidence
    residual = next(fact for fact in said if "composition explains" in fact.statement)
    assert facts.steps.slowdown > 1.3
    assert not residual.supports and "may be at fault" in residual.statement


def test_unaccounted_time_is_that_of_the_records_and_not_what_makes_the_sum_one(tmp_path):
    rows = read_evidence(synthetic_run(tmp_path / "run", plant="tiny_kv", requests=60)).rows
    for prefix, left, end in (
        ("ledger", "unaccounted_ns", "last_byte_ns"),
        ("ttft", "ttft_unaccounted_ns", "first_token_ns"),
    ):
        assert sum(shares(rows, prefix).values()) == pytest.approx(1)
        wrong = rows.assign(**{left: rows[left] + 1e6})
        too_much = 1e6 * len(rows) / float((rows[end] - rows.due_ns).sum())
        assert sum(shares(wrong, prefix).values()) == pytest.approx(1 + too_much)


def test_warm_up_touches_no_figure_of_the_steps(tmp_path):
    run = synthetic_run(tmp_path / "run", plant="small_batch_cap", requests=60)
    whole = read_evidence(run)
    meta = run.meta()
    meta["scenario"]["measure"] = {"warmup_requests": 20}
    run.update_meta(scenario=meta["scenario"])
    measured = read_evidence(run)
    first_due = run.requests().due_ns.iloc[20]
    assert measured.sent == 40 and measured.steps.count == int((run.table("steps").begin_ns >= first_due).sum())
    assert measured.steps.count < whole.steps.count


def with_whole_answers(run, count):
    """These clients read their whole answer at once."""
    table = pd.read_parquet(run.path / "client.parquet")
    for row in table.index[:count]:
        table.at[row, "first_token_ns"] = table.at[row, "last_byte_ns"]
        table.at[row, "chunk_ns"] = [table.at[row, "last_byte_ns"]]
        table.at[row, "chunk_tokens"] = [table.at[row, "output_tokens"]]
    table.to_parquet(run.path / "client.parquet")
    return diagnose(run)


@pytest.mark.parametrize(("count", "status"), [(0, "absent"), (20, "absent"), (21, "unknown"), (39, "unknown")])
def test_time_per_token_of_few_is_not_that_of_all(tmp_path, count, status):
    diagnosis = with_whole_answers(synthetic_run(tmp_path / "run", requests=40), count)
    row, told = diagnosis.goodput[0], diagnosis.checks[1]
    assert row.attainment_by_objective["tpot_ms"] == 1
    assert row.judged_by_objective == {"ttft_ms": 40, "tpot_ms": 40 - count}
    assert told.status == status and (f"{40 - count} of 40 served" in told.reason) == (count > 0)
    console = Console(width=120, file=io.StringIO())
    console.print(render(diagnosis))
    assert f"100% of {40 - count} " in console.file.getvalue()  # of all 40 in the headline


def test_requests_that_were_never_sent_are_not_told_as_the_servers_misses(tmp_path):
    run = synthetic_run(tmp_path / "run", requests=40)
    table = pd.read_parquet(run.path / "client.parquet")
    table.loc[:5, ["status", "error"]] = "missing", NO_END
    table.loc[6, ["status", "error"]] = "error", "HTTP 500"
    table.to_parquet(run.path / "client.parquet")
    warnings = diagnose(run).warnings
    assert "6 of 40 requests were not sent" in " ".join(warnings)
    assert "1 of 40 requests were not served: 1 × HTTP 500" in warnings


def test_time_per_token_that_nobody_could_measure_is_said_and_not_counted_as_kept(tmp_path):
    diagnosis = with_whole_answers(synthetic_run(tmp_path / "run", plant="slow_model", requests=40), 10)
    assert diagnosis.goodput[0].attainment_by_objective["tpot_ms"] == 0.0  # of the 30 that could be measured
    assert any("time per output token of 10 of 40 served requests" in warning for warning in diagnosis.warnings)
