"""Raw events of known stamps give exactly the record, the lag and the verdict that follow from them."""

import json
from dataclasses import asdict

import pytest
import yaml

from sojourn.loadgen.client.event_log import (
    BYTES,
    CLOSED,
    DISPATCHED,
    DUE,
    NO_REQUEST,
    RECONNECTED,
    SENT,
    STARTED,
    write_events,
    write_progress,
)  # fmt: skip
from sojourn.loadgen.record.parse import build_client_table
from sojourn.loadgen.run.run_files import begin_run, finish_run, recover, repeat_command
from sojourn.loadgen.scenario.scenario import load_scenario
from sojourn.loadgen.schedule.build import build_schedule
from sojourn.loadgen.schedule.request import save_schedule
from sojourn.loadgen.schedule.shards import DONE, Shard, write_shards
from sojourn.loadgen.target.endpoint import parse_base_url
from sojourn.loadgen.target.scrape import Scraper
from sojourn.metrics.request.goodput import measured
from sojourn.metrics.run.directory import RunDirectory
from tests.loadgen.scenarios import CHAT, log_of, replayed, scenario
from tests.loadgen.scripted_server import ScriptedServer

MS = 1_000_000
START = 10**12
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


def chunk(text: str, total: int) -> bytes:
    return b"data: %s\n\n" % json.dumps({"choices": [{"text": text}], "usage": {"completion_tokens": total}}).encode()


def recorded(run_dir, late_ms: float) -> RunDirectory:
    """Three requests, 100 ms apart. The second is dispatched late; the third was never sent."""
    chosen = scenario({"process": "times", "times_s": [0, 0.1, 0.2]})
    run = begin_run(run_dir, chosen, 0, {})
    save_schedule(run_dir, build_schedule(chosen, 0, "t"), chosen)
    events = [(NO_REQUEST, START, STARTED, b"")]
    for index, late in ((0, 0.0), (1, late_ms)):
        sent = START + index * 100 * MS + int(late * MS)
        events += [
            (index, sent, DISPATCHED, b""), (index, sent + MS, SENT, b""), (index, sent + 20 * MS, BYTES, HEAD),
            (index, sent + 50 * MS, BYTES, chunk("a", 1)), (index, sent + 80 * MS, BYTES, chunk("bc", 3)),
            (index, sent + 81 * MS, BYTES, b"data: [DONE]\n\n"), (index, sent + 90 * MS, CLOSED, b""),
        ]  # fmt: skip
    write_events(run_dir, log_of(events[:9]), 0)
    write_events(run_dir, log_of(events[9:]), 9)
    write_progress(run_dir, {"total": 3, "sent": 2, "finished": 2, "failed": 0})
    return run


def test_latency_counts_from_the_intended_time_however_late_the_generator_was(tmp_path):
    run = recorded(tmp_path / "run", late_ms=700)
    finish_run(run, [])
    requests = run.requests()
    assert requests.ttft_ms[:2].tolist() == [50.0, 750.0] and requests.e2e_ms[:2].tolist() == [81.0, 781.0]
    assert requests.tpot_ms[:2].tolist() == [15.0, 15.0]  # 30 ms for the two tokens after the first
    assert [list(tokens) for tokens in requests.chunk_tokens] == [[1, 2], [1, 2], []]
    assert requests.status.tolist() == ["ok", "ok", "missing"]
    assert requests.due_ns.tolist() == [START, START + 100 * MS, START + 200 * MS]


@pytest.mark.parametrize(("late_ms", "judged_late"), [(49.0, False), (52.0, True)])
def test_generator_that_is_late_by_a_tenth_of_the_objective_makes_the_run_invalid(tmp_path, late_ms, judged_late):
    run = recorded(tmp_path / "run", late_ms)
    finish_run(run, [])
    meta = run.meta()
    assert meta["client_error"]["lag_max_ms"] == late_ms + 1 and meta["client_error"]["dispatch_max_ms"] == late_ms
    assert any("sent late" in reason for reason in meta["invalid_reasons"]) == judged_late  # the objective is 500 ms
    assert "1 of 3 scheduled requests were never sent or have no recorded end" in meta["invalid_reasons"]
    assert meta["valid"] is False and not list(run.path.glob("progress*"))


def test_ideal_and_lateness_of_a_closed_loop_are_of_what_it_sent_after_warmup(tmp_path):
    """Of 200 that were built eight had their turn, not in the order of building; the first three were warm-up."""
    pool = CHAT | {"prompt_tokens": 80, "shared_prefix_tokens": 64, "num_shared_prefixes": 5}
    chosen = scenario({"process": "concurrency", "in_flight": 2, "count": 200}, [pool], measure={"warmup_s": 0.25})
    run, schedule = begin_run(tmp_path / "run", chosen, 0, {}), build_schedule(chosen, 0, "t")
    save_schedule(run.path, schedule, chosen)
    order, events = [4, 1, 5, 2, 0, 3, 7, 6], [(NO_REQUEST, START, STARTED, b"")]
    for place, index in enumerate(order):
        due, late = START + place * 100 * MS, (40 if place < 3 else 1) * MS
        events += [
            (index, due, DUE, b""), (index, due + late, DISPATCHED, b""), (index, due + 2 * late, SENT, b""),
            (index, due + 90 * MS, BYTES, HEAD + chunk("a", 1)), (index, due + 95 * MS, CLOSED, b""),
        ]  # fmt: skip
    write_events(run.path, log_of(events), 0)
    finish_run(run, [])
    seen, hits = set(), []
    for index in order:
        hits.append(64 * (schedule[index].shared_prefix in seen))
        seen.add(schedule[index].shared_prefix)
    meta = run.meta()
    assert meta["client_error"]["lag_max_ms"] == 2 and meta["client_error"]["dispatch_max_ms"] == 1
    assert set(measured(run.requests(), meta).request_id) == {schedule[index].request_id for index in order[3:]}
    ideal = meta["workload"]["prefix"]
    assert (ideal["prompt_tokens"], ideal["ideal_hit_tokens"]) == (5 * 80, sum(hits[3:]))
    (run.path / "client.parquet").unlink()  # as if all had been killed before it was built
    run.update_meta(workload={})
    assert recover(run.path) and run.meta()["workload"]["prefix"] == ideal


def test_run_that_never_began_reads_and_says_so(tmp_path):
    chosen = scenario()
    run = begin_run(tmp_path / "run", chosen, 0, {})
    finish_run(run, ["stopped with Ctrl-C"])
    assert run.meta()["invalid_reasons"] == ["stopped with Ctrl-C", "nothing was sent"]
    save_schedule(run.path, build_schedule(chosen, 0, "t"), chosen)
    finish_run(run, [])
    assert run.meta()["invalid_reasons"] == ["the load stopped before its schedule began"]
    assert set(run.requests().status) == {"missing"}


def answered(index: int, sent: int) -> list[tuple]:
    return [
        (NO_REQUEST, START, STARTED, b""), (index, sent, DISPATCHED, b""), (index, sent, SENT, b""),
        (index, sent + MS, BYTES, HEAD + chunk("a", 1)), (index, sent + 2 * MS, BYTES, b"data: [DONE]\n\n"),
        (index, sent + 3 * MS, CLOSED, b""),
    ]  # fmt: skip


@pytest.mark.parametrize("reasons", [[], ["stopped with Ctrl-C"]])
def test_run_is_judged_anew_when_the_events_of_another_host_are_brought_to_it(tmp_path, reasons):
    chosen = scenario({"process": "times", "times_s": [0, 0.1]})
    run = begin_run(tmp_path / "run", chosen, 0, {})
    save_schedule(run.path, build_schedule(chosen, 0, "t"), chosen)
    write_events(run.path, log_of(answered(0, START)), 0)
    write_events(tmp_path / "elsewhere", log_of(answered(1, START + 100 * MS)), 0)
    parts = [Shard(0, "here", 1, DONE), Shard(1, "elsewhere", 1, DONE, clock_uncertainty_ms=0.2)]
    write_shards(run.path, parts)
    finish_run(run, reasons)
    before = run.meta()
    assert before["invalid_reasons"][-1].startswith("1 of 2 scheduled requests were never sent")
    assert not recover(run.path)
    (tmp_path / "elsewhere" / "client_raw.parts").rename(run.path / "client_raw.parts")
    assert recover(run.path) and not recover(run.path)
    meta = run.meta()
    assert (meta["valid"], meta["invalid_reasons"]) == (not reasons, reasons)
    assert meta["load_processes"] == before["load_processes"] == [asdict(part) for part in parts]
    assert "other hosts sent too" in meta["client_error"]["calibration"]["unknown"]
    assert set(run.requests().status) == {"ok"}


def test_killed_run_is_judged_by_what_it_left(tmp_path):
    run = recorded(tmp_path / "run", late_ms=700)
    write_shards(run.path, [Shard(0, "a", 3)])
    assert recover(run.path)
    unfinished, *found = run.meta()["invalid_reasons"]
    assert unfinished == "the run did not finish" and len(found) == 3  # a part without its end, not sent, sent late
    assert not (run.path / "shards.json").exists() and run.meta()["load_processes"][0]["requests"] == 3


def test_segment_half_written_when_the_generator_was_killed_is_not_read(tmp_path):
    run = recorded(tmp_path / "run", 0)
    (run.path / "client_raw.parts" / ".00000000-1.tmp").write_bytes(b"PAR1 cut off")
    assert [record.status for record in replayed(run.path).records] == ["ok", "ok", "missing"]


@pytest.mark.server
def test_last_scrape_comes_after_all_that_was_counted(tmp_path):
    server = ScriptedServer().start()
    scraper = Scraper(parse_base_url(server.url), tmp_path)
    scraper.start()
    server.seen.append({})
    scraper.stop()
    rows = RunDirectory(tmp_path).table("scrapes")
    assert rows[rows.name == "scripted_requests_total"].value.max() == 1


def test_command_in_the_run_document_repeats_scenario_settings_and_seed():
    chosen = {"max_num_seqs": 4, "prefix_caching": False, "device": "cpu", "model": "4"}
    command = repeat_command("run", load_scenario("demo"), 3, set=chosen)
    assert command[:5] == ["sojourn", "run", "demo", "--set", "max_num_seqs=4"] and command[-2:] == ["--seed", "3"]
    pairs = dict(word.split("=", 1) for word in command if "=" in word)
    assert {key: yaml.safe_load(value) for key, value in pairs.items()} == chosen
    assert "--model" not in repeat_command("load", load_scenario("demo"), 3, base_url="http://h", model=None)


def test_stale_connections_are_counted_where_there_were_any(tmp_path):
    run = recorded(tmp_path / "run", 0)
    assert "stale_connections" not in build_client_table(run.path).client_error
    write_events(run.path, log_of([(1, START, RECONNECTED, b"a kept connection was closed")]), 100)
    assert build_client_table(run.path).client_error["stale_connections"] == 1
