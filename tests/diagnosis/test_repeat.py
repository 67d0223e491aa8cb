"""Every command that a diagnosis prints: the program reads it, and it answers what it is printed for."""

import io
import shlex
from dataclasses import replace

import pytest
from rich.console import Console

from sojourn.diagnosis.diagnose import diagnose
from sojourn.diagnosis.evidence import read_evidence
from sojourn.diagnosis.repeat import RECORDS, START, rerun, with_records, with_settings
from sojourn.diagnosis.symptom_tree.tree import symptom_tree
from sojourn.diagnosis.terminal.short_report import ShortReport
from sojourn.metrics.run.directory import RunDirectory
from tests.commands.program import parsed, run_program
from tests.diagnosis.test_client_only import TRACES, client_run
from tests.metrics.synthetic import synthetic_run

HERE = "http://127.0.0.1:8000"
LOAD = ["sojourn", "load", "my chat.yaml", "--base-url", HERE, "--seed", "3"]


def given(tmp_path, command, **engine) -> RunDirectory:
    run = synthetic_run(tmp_path / "run", requests=5)
    run.update_meta(command=command, engine=run.meta()["engine"] | {"base_url": HERE} | engine)
    return run


@pytest.mark.parametrize("trace", TRACES)
def test_proof_of_a_run_without_server_records_gets_them(tmp_path, trace):
    """The first one that was seen to fail: the printed command repeated the same blind run."""
    make, *_ = TRACES[trace]
    run = client_run(tmp_path / "run", [make(number) for number in range(60)])
    run.update_meta(command=LOAD, engine={"base_url": HERE})
    diagnosis = diagnose(run)
    console = Console(width=80, file=io.StringIO())
    console.print(ShortReport(diagnosis, "sojourn diagnose x -v"))
    said = " ".join(console.file.getvalue().split())
    if diagnosis.findings:
        assert f"{START} with `--run-dir {RECORDS}`" in said and f"--server-run {RECORDS}" in said
    tree = symptom_tree(read_evidence(run), diagnosis, "high_ttft")
    probes = [(each.probe.measurement, each.probe.command) for each in diagnosis.findings]
    for measurement, command in [*probes, (tree.next_measurement, tree.next_command)]:
        verb, options = parsed(command)
        assert (verb, options["scenario"], options["seed"]) == ("load", "my chat.yaml", 3)
        assert [str(path) for path in options["server_run"]] == [RECORDS]
        assert f"--run-dir {RECORDS}" in measurement and f"--server-run {RECORDS}" in measurement


@pytest.mark.parametrize(
    ("owner", "starts"),
    [("sojourn", f"--run-dir {RECORDS}"), ("vllm", f"sojourn-probe vllm --out {RECORDS}"), ("someone", "--run-dir")],
)
def test_the_words_say_how_a_server_comes_to_record(tmp_path, owner, starts):
    old = [*LOAD, "--server-run", "elsewhere"]
    measurement, command = with_records(read_evidence(given(tmp_path, old, served={"owned_by": owner})))
    assert starts in measurement and [str(path) for path in parsed(command)[1]["server_run"]] == [RECORDS]


def test_records_of_another_host_are_joined_by_hand(tmp_path):
    measurement, command = with_records(read_evidence(given(tmp_path, LOAD, base_url="http://gpu-7:8000")))
    assert command == "" and "on gpu-7" in measurement and "`sojourn join`" in measurement


def test_a_server_that_is_watched_is_watched_with_its_records(tmp_path):
    facts = replace(read_evidence(given(tmp_path, None)), measured_by="server")
    measurement, command = with_records(facts)
    verb, options = parsed(command)
    assert (verb, options["urls"], [str(path) for path in options["server_run"]]) == ("watch", [HERE], [RECORDS])
    assert measurement.startswith("its records of each step: start the server with")


def test_what_no_command_can_repeat_has_none(tmp_path):
    for meta in ({"command": None}, {"imported": {"tool": "aiperf"}}):
        run = given(tmp_path / str(len(meta)) / next(iter(meta)), LOAD)
        run.update_meta(**meta)
        facts = read_evidence(run)
        assert rerun(facts, max_num_seqs=8) == "" and with_records(facts)[1] == "" and "--server-run" in (
            with_records(facts)[0]
        )  # fmt: skip


def test_other_settings_are_set_where_a_command_starts_the_server_and_said_where_it_does_not(tmp_path):
    own = read_evidence(given(tmp_path / "own", ["sojourn", "run", "demo", "--set", "max_num_seqs=2", "--seed", "1"]))
    verb, options = parsed(with_settings(own, "the same scenario", {"max_num_seqs": 8})[1])
    assert (verb, options["set_"], options["seed"]) == ("run", ["max_num_seqs=8"], 1)
    foreign = read_evidence(given(tmp_path / "foreign", [*LOAD, "--server-run", "runs/s"]))
    measurement, command = with_settings(foreign, "the same scenario", {"max_num_seqs": 8})
    assert "start the server again with max_num_seqs=8 and records in runs/s-2" in measurement
    assert [str(path) for path in parsed(command)[1]["server_run"]] == ["runs/s-2"]
    sent = ["sojourn", "locust", "-f", "users.py", "--headless", "--host", HERE]
    users = read_evidence(given(tmp_path / "users", sent))
    measurement, command = with_settings(users, "the same scenario", {"max_num_seqs": 8})
    assert "start the server again with max_num_seqs=8" in measurement and shlex.split(command) == sent
    assert rerun(users, max_num_seqs=8) == ""


def test_another_rate_is_an_option_where_the_arrivals_have_one(tmp_path):
    run = given(tmp_path, [*LOAD, "--rate", "9"])
    scenario = run.meta()["scenario"]
    facts = read_evidence(run)
    verb, options = parsed(rerun(facts, rate_rps=facts.offered_rps / 2))
    assert verb == "load" and options["rate"] == 3.0 == scenario["arrivals"]["rate_rps"] / 2
    run.update_meta(scenario=scenario | {"arrivals": {"process": "poisson", "rate_rps": 0.9}})  # of sessions
    assert parsed(rerun(read_evidence(run), rate_rps=facts.offered_rps / 2))[1]["rate"] == 0.45
    run.update_meta(scenario=scenario | {"arrivals": {"process": "trace", "file": "x.csv"}})
    assert rerun(read_evidence(run), rate_rps=2.5) == ""


@pytest.mark.parametrize("plant", ["overload", "small_batch_cap"])
def test_commands_of_a_joined_run_change_what_the_measurement_says(tmp_path, plant):
    diagnosis = diagnose(synthetic_run(tmp_path / "run", plant=plant))
    commands = [(each.probe.measurement, each.probe.command) for each in diagnosis.findings if each.probe.command]
    assert commands
    for _, command in commands:
        verb, options = parsed(command)
        assert verb == "run" and (options["set_"] or options["rate"]), command


def test_records_that_are_not_there_yet_are_answered_with_how_they_come(tmp_path):
    done = run_program("load", "127.0.0.1:9", "--rate", "1", "--server-run", RECORDS, cwd=tmp_path)
    assert done.returncode == 2 and f"sojourn serve MODEL --run-dir {RECORDS}" in done.stderr
