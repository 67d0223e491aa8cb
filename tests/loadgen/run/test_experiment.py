"""Whole experiments, Locust in a process of its own: what they record, and what is left when they are cut short."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from sojourn.loadgen.record.parse import build_client_table
from sojourn.loadgen.run.experiment import engine_settings, load_url, run_scenario
from sojourn.loadgen.run.run_files import begin_run, recover
from sojourn.loadgen.target.endpoint import EndpointError
from sojourn.loadgen.target.processes import free_port, load_command, serve_command
from sojourn.metrics.errors import ExperimentError, InputError
from sojourn.metrics.records.tables import SCHEMAS
from sojourn.metrics.results.load import load_notes
from sojourn.metrics.run.directory import REQUIRED, RunDirectory
from tests.loadgen.scenarios import CHAT, replayed, scenario
from tests.loadgen.scripted_server import Script, ScriptedServer

pytestmark = pytest.mark.server

BUSY = {"process": "constant", "rate_rps": 20, "count": 400}  # 20 s: longer than anything here waits for


def scenario_file(folder: Path, chosen) -> str:
    file = folder / "test.yaml"
    file.write_text(yaml.safe_dump(chosen.model_dump(mode="json", exclude_none=True)))
    return str(file)


def start_load(folder: Path, chosen, url: str, run_dir: Path) -> subprocess.Popen:
    command = load_command(scenario_file(folder, chosen), url, run_dir, {})
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder)


def wait_for(condition, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One ordinary run against the scripted server, with the progress that it showed."""
    card = {"engine": {"max_num_seqs": 256}}
    headers = b"X-LiteLLM-Overhead-Duration-MS: 7.5\r\nx-litellm-response-duration-ms: 47.5\r\n"
    server, shown = ScriptedServer(Script(first_token_s=0.05, card=card, headers=headers)).start(), []
    chosen = scenario(
        {"process": "poisson", "rate_rps": 30, "count": 45}, [CHAT, CHAT | {"klass": "other", "tenant": "b"}]
    )
    run = load_url(chosen, server.url, tmp_path_factory.mktemp("runs") / "run", progress=shown.append)
    return run, server, shown


def test_every_scheduled_request_is_recorded_once_with_what_the_server_said(finished):
    run, server, _ = finished
    client = run.table("client")
    assert list(client.columns) == SCHEMAS["client"].names
    assert set(client.status) == {"ok"} and len(client) == 45
    assert sorted(client.request_id) == sorted(seen["headers"]["x-request-id"] for seen in server.seen)
    assert set(client.output_tokens) == {5} and all(list(tokens) == [1] * 5 for tokens in client.chunk_tokens)
    assert (client.sent_ns >= client.due_ns).all() and (client.first_token_ns - client.sent_ns >= 50e6).all()
    assert set(client.klass) == {"chat", "other"} and set(client[client.klass == "other"].tenant) == {"b"}


def test_the_split_that_a_front_states_in_its_headers_is_recorded_and_shown(finished):
    meta = finished[0].meta()
    assert meta["front"] == {
        "front": "LiteLLM", "replies": 45, "overhead_ms": {"mean": 7.5, "p50": 7.5, "p99": 7.5},
        "server_ms": {"mean": 40.0, "p50": 40.0, "p99": 40.0},
    }  # fmt: skip
    assert load_notes(meta)[0] == (
        "LiteLLM says of 45 answers, up to the first byte of each stream: its own overhead 7.5 ms on average (p99 7.5),"
        " the server behind it 40.0 ms on average (p99 40.0)"
    )


def test_run_document_tells_all_that_a_reader_needs(finished):
    run, _, _ = finished
    meta = run.meta()
    assert set(REQUIRED) <= set(meta)
    assert meta["scenario"]["name"] == "test" and meta["objectives"][0]["ttft_ms"] == 500
    assert meta["hardware"]["cores"] >= 1 and "locust" in meta["versions"]
    assert meta["engine"]["model"] == "scripted" and meta["failed_scrapes"] == 0
    copy = str(run.path / "scenario.yaml")  # no file of the user has this scenario
    assert meta["command"] == ["sojourn", "load", copy, "--base-url", meta["engine"]["base_url"], "--seed", "0"]
    assert (
        0
        <= meta["client_error"]["lag_p50_ms"]
        <= meta["client_error"]["lag_p99_ms"]
        <= meta["client_error"]["lag_max_ms"]
    )
    assert meta["valid"] or meta["invalid_reasons"][0].startswith("the load generator sent late")


def test_settings_that_the_server_told_of_stand_apart_from_those_that_were_chosen(finished):
    engine = finished[0].meta()["engine"]
    assert set(engine) == {"base_url", "model", "served"}
    assert engine["served"] == {"id": "scripted", "engine": {"max_num_seqs": 256}}


def test_foreign_server_s_metrics_are_scraped_over_the_run(finished):
    run, _, _ = finished
    scrapes = run.table("scrapes")
    values = scrapes[scrapes.name == "scripted_requests_total"].sort_values("ns").value.tolist()
    assert values[0] == 0 and values[-1] == 45


def test_finished_run_has_no_leftovers_and_showed_its_progress(finished):
    run, _, shown = finished
    assert {path.name for path in run.path.iterdir()} == {
        "run.json", "scenario.yaml", "schedule.parquet", "client.parquet", "client_raw.parquet", "scrapes.parquet",
        "loadgen.log",
    }  # fmt: skip
    sending = [progress for progress in shown if progress.stage == "sending"]
    assert sending[-1].finished == sending[-1].total == 45 and shown[-1].stage == "gathering"


def test_rebuilding_the_client_table_changes_nothing(finished):
    run, _, _ = finished
    before = (run.path / "client.parquet").read_bytes()
    build_client_table(run.path)
    assert (run.path / "client.parquet").read_bytes() == before


def test_killed_load_generator_loses_at_most_the_last_second(tmp_path):
    server = ScriptedServer(Script(gap_s=0.02, num_tokens=10)).start()
    run_dir = tmp_path / "run"
    begin_run(run_dir, scenario(BUSY), 0, {})
    load = start_load(tmp_path, scenario(BUSY), server.url, run_dir)
    wait_for(lambda: len(server.seen) >= 50)
    load.kill()
    killed_ns = time.monotonic_ns()
    load.wait()
    parsed = replayed(run_dir)
    assert len(parsed.records) == 400
    ended = [record for record in parsed.records if record.status == "ok"]
    # flushed every 0.5 s; what a flush itself takes on a busy machine is the rest of the second
    assert killed_ns - max(record.last_byte_ns for record in ended) < 1e9
    assert {record.status for record in parsed.records} == {"ok", "missing"}
    assert len(RunDirectory.open(run_dir).table("client")) == 400


def start_experiment(folder: Path, url: str, run_dir: Path) -> subprocess.Popen:
    code = (
        "import sys; from sojourn.loadgen.run.experiment import load_url\n"
        "from sojourn.loadgen.scenario.scenario import load_scenario\n"
        "load_url(load_scenario(sys.argv[1]), sys.argv[2], sys.argv[3])"
    )
    arguments = [scenario_file(folder, scenario(BUSY)), url, str(run_dir)]
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stderr=subprocess.DEVNULL)


def test_run_under_way_shows_the_requests_that_have_ended_and_is_left_alone(tmp_path):
    server, run_dir = ScriptedServer(Script(gap_s=0.02)).start(), tmp_path / "run"
    experiment = start_experiment(tmp_path, server.url, run_dir)
    try:
        wait_for(lambda: RunDirectory(run_dir).sources("client"))
        client = RunDirectory.open(run_dir).table("client")
        assert set(client.status) == {"ok"} and 0 < len(client) < 400 and (client.chunk_ns.map(len) == 5).all()
        assert not recover(run_dir) and (run_dir / "client_raw.parts").is_dir()
    finally:
        experiment.send_signal(signal.SIGINT)
        experiment.wait(30)
    whole = RunDirectory.open(run_dir).table("client")
    assert len(whole) == whole.request_id.nunique() == 400
    both = client.merge(whole, on=list(set(client.columns) - {"chunk_ns", "chunk_tokens"}))
    assert len(both) == len(client)  # what was shown under way is what was found in the end


def test_killed_experiment_takes_its_load_with_it_and_can_be_recovered(tmp_path):
    server, run_dir = ScriptedServer(Script(gap_s=0.02)).start(), tmp_path / "run"
    experiment = start_experiment(tmp_path, server.url, run_dir)
    wait_for(lambda: len(server.seen) >= 30)
    experiment.kill()
    experiment.wait()
    wait_for(lambda: recover(run_dir), timeout_s=10)  # the load generator has ended: nobody records any more
    seen = len(server.seen)
    client = RunDirectory.open(run_dir).table("client")
    assert len(client) == client.request_id.nunique() == 400 and (client.status == "ok").sum() >= 25
    meta = RunDirectory.open(run_dir).meta()
    assert meta["valid"] is False and meta["client_error"]["lag_p50_ms"] >= 0
    assert not list(run_dir.glob("progress*"))
    before = (run_dir / "client.parquet").read_bytes()
    assert not recover(run_dir) and (run_dir / "client.parquet").read_bytes() == before
    assert len(server.seen) == seen < 400


def test_ctrl_c_leaves_a_run_that_reads_and_says_why_it_is_not_valid(tmp_path):
    server = ScriptedServer(Script(gap_s=0.02)).start()
    experiment = start_experiment(tmp_path, server.url, tmp_path / "run")
    wait_for(lambda: len(server.seen) >= 20)
    experiment.send_signal(signal.SIGINT)
    assert experiment.wait(30) != 0
    run = RunDirectory.open(tmp_path / "run")
    assert run.meta()["valid"] is False and "stopped with Ctrl-C" in run.meta()["invalid_reasons"]
    statuses = run.table("client").status.value_counts()
    assert statuses["ok"] >= 10 and statuses.sum() == 400
    seen = len(server.seen)
    time.sleep(0.3)
    assert len(server.seen) == seen  # the load generator has ended too


def test_unreachable_server_is_refused_and_leaves_no_folder(tmp_path):
    with pytest.raises(EndpointError, match=r"no server answers at http://127\.0\.0\.1:\d+ \(Connection refused\)"):
        load_url(scenario(), f"http://127.0.0.1:{free_port()}", tmp_path / "run")
    with pytest.raises(InputError, match="no http address"):
        load_url(scenario(), "ftp://localhost:8000", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_model_that_the_server_does_not_list_is_refused_before_anything_is_sent(tmp_path):
    server = ScriptedServer().start()
    for asked in ({"model": "nope"}, {"chosen": scenario(target={"model": "nope"})}):
        with pytest.raises(EndpointError, match="serves no model 'nope'; it lists: scripted"):
            load_url(asked.get("chosen") or scenario(), server.url, tmp_path / "run", model=asked.get("model"))
    assert not (tmp_path / "run").exists() and not server.seen


def test_server_that_serves_no_models_is_refused(tmp_path):
    server = ScriptedServer()
    server._answer = lambda reader, writer: server._document(writer, 404, {})
    server.start()
    with pytest.raises(EndpointError, match="names no model"):
        load_url(scenario(), server.url, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_server_that_refuses_the_key_says_where_a_key_goes(tmp_path):
    server = ScriptedServer()
    refusal = {"error": {"message": "no API key was sent"}}
    server._answer = lambda reader, writer: server._document(writer, 401, refusal)
    server.start()
    with pytest.raises(EndpointError, match=r"HTTP 401: no API key was sent\); set .* SOJOURN_API_KEY"):
        load_url(scenario(), server.url, tmp_path / "run")


def test_folder_that_holds_files_is_never_written_into(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ExperimentError, match="is not empty"):
        load_url(scenario(), ScriptedServer().start().url, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_scenario_without_a_model_cannot_start_an_engine(tmp_path):
    with pytest.raises(ExperimentError, match=r"names no engine\.model"):
        run_scenario(scenario(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_engine_that_does_not_start_is_quoted_and_leaves_no_folder(tmp_path):
    chosen = scenario(engine={"model": "tiny-model", "max_num_seqs": 0})
    with pytest.raises(ExperimentError, match=r"(?s)ended with exit code \d+ before it was ready; its last lines:\n.+"):
        run_scenario(chosen, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_engine_block_becomes_flags_of_serve():
    settings = {"model": "m", "num_kv_blocks": 96, "prefix_caching": False, "policy": "fcfs"}
    settings["lora_adapters"] = ["a=folder-a", "b=folder-b"]
    command = serve_command(settings, 8123, Path("runs/x"))
    assert command[1:] == [
        "-m", "sojourn", "serve", "m", "--num-kv-blocks", "96", "--no-prefix-caching", "--policy", "fcfs",
        "--lora-adapters", "a=folder-a", "--lora-adapters", "b=folder-b", "--no-spare-core",
        "--host", "127.0.0.1", "--port", "8123", "--run-dir", "runs/x",
    ]  # fmt: skip


def test_engine_without_telemetry_is_given_nothing_that_it_could_only_refuse():
    """No folder to record into and no objectives to count: both need records."""
    chosen = {"model": "m", "telemetry": "off"}
    assert engine_settings(scenario(), chosen) == chosen
    assert engine_settings(scenario(), {"model": "m"}) == {"model": "m", "objective_ttft_ms": 500}
    assert "--run-dir" not in serve_command(chosen, 8123, Path("runs/x"))


def test_locust_alone_records_a_run(tmp_path):
    server = ScriptedServer().start()
    alone = start_load(tmp_path, scenario(), server.url, tmp_path / "run")
    assert alone.wait(60) == 0, alone.stdout.read()
    assert "recorded in" in alone.stdout.read()
    assert RunDirectory.open(tmp_path / "run").meta()["valid"] in (True, False)
    assert set(RunDirectory.open(tmp_path / "run").table("client").status) == {"ok"}


def test_locust_that_is_stopped_by_its_run_time_leaves_a_whole_shorter_run(tmp_path):
    """Requests in flight end, nobody fails, and the diagnosis lies with the run."""
    server = ScriptedServer(Script(first_token_s=0.5)).start()
    chosen = scenario({"process": "constant", "rate_rps": 10, "duration_s": 60})
    command = load_command(scenario_file(tmp_path, chosen), server.url, tmp_path / "run", {"run-time": "4s"})
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, cwd=tmp_path)
    run = RunDirectory.open(tmp_path / "run")
    assert done.returncode == (0 if run.meta()["valid"] else 4), done.stderr
    client = run.table("client")
    assert set(client.status) == {"ok"} and 10 <= len(client) == len(server.seen) <= 60
    assert "Locust was stopped" in run.meta()["stopped_early"]["reason"]
    assert (run.path / "diagnosis.json").exists() and "sojourn diagnose" in done.stdout
    assert "TTFT" in done.stderr + done.stdout and "leaked" not in done.stderr


def test_locust_refuses_a_bad_scenario_with_its_sentence(tmp_path):
    (tmp_path / "bad.yaml").write_text(json.dumps({"description": "x", "target": {"api": "grpc"}}))
    command = load_command("bad.yaml", "http://127.0.0.1:1", tmp_path / "run", {})
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert refused.returncode == 2 and "`target.api` is 'grpc'" in refused.stderr
    assert not (tmp_path / "run").exists()


def test_replay_that_cannot_be_recorded_ends_with_a_sentence_and_is_not_sent_again(tmp_path):
    server, run_dir = ScriptedServer(Script(first_token_s=0.5)).start(), tmp_path / "run"
    chosen = scenario({"process": "constant", "rate_rps": 20, "count": 30})
    load = start_load(tmp_path, chosen, server.url, run_dir)
    wait_for(lambda: len(server.seen) >= 5)
    shutil.rmtree(run_dir)
    run_dir.write_text("a file where the folder was")
    try:
        said = load.communicate(timeout=30)[0]
    finally:
        load.kill()
    assert load.returncode == 1 and "nothing of the run remains" in said and "Traceback" not in said
    assert len(server.seen) == 30
