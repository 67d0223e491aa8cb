"""A recorded watch opens as a run, with the verdict that it had."""

import pytest

from sojourn.commands.summary import diagnose_run
from sojourn.live.watch import records
from sojourn.live.watch.observer import Observer
from sojourn.live.watch.recorded import record, recorded_meta
from sojourn.live.watch.records import Records
from sojourn.live.watch.watcher import Watched
from sojourn.metrics.errors import RunDataError
from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.run.segments import StreamSegment
from sojourn.metrics.run.server_alone import SERVER_ALONE
from tests.metrics.foreign import steady
from tests.metrics.live_pages import observed
from tests.metrics.synthetic import synthetic_run

WAITING = steady(100, every_s=0.4, queue_s=2.0)


@pytest.mark.parametrize("objectives", [{}, {"ttft_ms": 500.0}], ids=["own work", "objective"])
def test_its_diagnosis_is_the_verdict_of_the_watch(tmp_path, objectives):
    observer = observed(WAITING, 40, lambda _: (4, 6, 0.2), objectives)
    said = observer.watched()
    found = diagnose_run(RunDirectory.open(record(observer, tmp_path)))
    assert (found.state, found.headline) == (said.state, said.headline)
    assert [each.key for each in found.findings] == [each.key for each in said.findings] == ["batch_cap"]
    assert found.server.finished == said.view.finished


def test_a_recorded_watch_of_a_hung_engine_is_stuck(tmp_path):
    observer = observed(steady(40, every_s=0.4), 60, lambda _: (3, 2, 0.2))  # the last one ends in second 17
    found = diagnose_run(RunDirectory.open(record(observer, tmp_path)))
    assert observer.watched().state == found.state == "stuck"
    assert "3 running and 2 waiting" in found.headline


def test_nothing_is_recorded_of_a_server_that_never_answered(tmp_path):
    with pytest.raises(RunDataError, match="two scrapes"):
        record(observed([], 0, lambda _: (0, 0, 0.0)), tmp_path)


def test_moments_of_a_prometheus_are_of_the_wall_clock(tmp_path):
    observer = Observer("http://x", "x", {}, window_s=60.0)
    for scrape in observed(WAITING, 5, lambda _: (4, 6, 0.2)).window.answered:
        rows = [{"name": name, "labels": labels, "value": value} for (name, labels), value in scrape.values.items()]
        observer.add(1_800_000_000_000_000_000 + scrape.ns, rows)
    anchor = RunDirectory.open(record(observer, tmp_path)).meta()["wall_anchor"]
    assert anchor["unix_ns"] == anchor["monotonic_ns"] > 1_700_000_000_000_000_000  # the list of runs has its date


def test_records_give_the_full_diagnosis_of_their_last_seconds(tmp_path, monkeypatch):
    """The records of a server with a cap of its batch, without any client's."""
    run = synthetic_run(tmp_path / "server", plant="small_batch_cap", requests=120)
    for file in run.sources("client"):
        file.unlink()
    run.update_meta(valid=False, invalid_reasons=[SERVER_ALONE], objectives=[])
    ended_ns = int(run.table("requests").finished_ns.max())
    monkeypatch.setattr(records.time, "monotonic_ns", lambda: ended_ns)
    bounds = {"ttft_ms": 300.0, "tpot_ms": 60.0}
    whole, last = Records(run.path, 1e6).read(bounds).diagnosis, Records(run.path, 3.0).read(bounds).diagnosis
    assert whole.findings[0].key == "batch_cap" and whole.goodput[0].sent == 120
    assert 0 < last.goodput[0].sent < 120
    assert Records(run.path, 1e-3).read(bounds).diagnosis is None


def test_records_that_were_read_are_not_read_again(tmp_path, monkeypatch):
    """A server writes half of its requests and steps, then the rest; the first half is damaged in between."""
    run = synthetic_run(tmp_path / "server", plant="small_batch_cap", requests=40)
    for file in run.sources("client"):
        file.unlink()
    run.update_meta(valid=False, invalid_reasons=[SERVER_ALONE], objectives=[])
    ended_ns = int(run.table("requests").finished_ns.max())
    monkeypatch.setattr(records.time, "monotonic_ns", lambda: ended_ns)
    bounds = {"ttft_ms": 300.0, "tpot_ms": 60.0}
    wanted = Records(run.path, 1e6).read(bounds).diagnosis
    rows = {table: run.arrow(table) for table in ("requests", "steps")}
    segments = {}
    for table, content in rows.items():
        (run.path / f"{table}.parquet").unlink()
        segments[table] = StreamSegment(run.path / f"{table}.parts" / "0.arrows", content.schema)
        segments[table].append(content[: len(content) // 2])
    live = Records(run.path, 1e6)
    assert live.read(bounds).diagnosis.goodput[0].sent == 20
    for table, content in rows.items():
        with (run.path / f"{table}.parts" / "0.arrows").open("r+b") as file:
            file.write(b"?" * 64)
        segments[table].append(content[len(content) // 2 :])
    found = live.read(bounds).diagnosis
    assert (found.headline, found.goodput, found.ledger_share) == (wanted.headline, wanted.goodput, wanted.ledger_share)


def test_records_decide_while_they_are_of_the_window_and_of_this_server(tmp_path, monkeypatch):
    run = synthetic_run(tmp_path / "server", plant="small_batch_cap", requests=120)
    for file in run.sources("client"):
        file.unlink()
    run.update_meta(valid=False, invalid_reasons=[SERVER_ALONE], objectives=[])
    clock = {"ns": int(run.table("requests").finished_ns.max())}
    monkeypatch.setattr(records.time, "monotonic_ns", lambda: clock["ns"])
    slow = observed(steady(100, every_s=0.4, prefill_s=1.5), 40, lambda _: (4, 0, 0.2), {"ttft_ms": 300.0})
    watched = Watched(slow, run.path)
    judged = lambda: watched._with_records(slow.watched())  # noqa: E731
    monkeypatch.setattr(watched, "_diagnose_beside", lambda: None)
    early = judged()
    assert (early.reads, early.state) == ("metrics", "cannot tell") and "no records are read yet" in early.evidence
    watched._diagnose()
    used = judged()
    assert used.reads == "records" and used.findings[0].key == "batch_cap" and "the newest 0 s old" in used.evidence
    clock["ns"] += int(0.9 * slow.window_s * 1e9)
    late = judged()
    assert late.reads == "metrics" and "older than the window" in late.evidence and late.diagnosis is None
    watched._diagnose()  # too few are in the window
    empty = judged()
    assert (empty.reads, empty.state) == ("metrics", "cannot tell")
    assert "neither vLLM's metrics nor its records name a cause" in empty.headline
    assert not any("sojourn-probe" in each for each in empty.unknown)
    clock["ns"] -= int(0.9 * slow.window_s * 1e9)
    slow.window.restarts, slow.window.first_ns = 1, clock["ns"]
    watched._diagnose()
    assert watched._reading.requests <= 1  # none of before the restart


def test_a_server_of_another_machine_gets_no_hardware_of_this_one():
    for url, is_here in (("http://127.0.0.1:8000", True), ("http://[::1]:8000", True), ("http://10.0.0.7:8000", False)):
        assert (recorded_meta(url, {}, is_wall_clock=False)["hardware"] is not None) is is_here
    assert recorded_meta("http://127.0.0.1:9090", {}, is_wall_clock=True)["hardware"] is None  # of a Prometheus
