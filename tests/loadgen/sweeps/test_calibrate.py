"""`sojourn calibrate client` on errors that are planted, and once for real at a small load."""

import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from sojourn.loadgen.client.socket_loop import SocketLoop
from sojourn.loadgen.reference_server import accuracy
from sojourn.loadgen.reference_server.accuracy import CLIENT_FILES, client_fingerprint, compare, with_calibration
from sojourn.loadgen.reference_server.instructions import ServedRequest
from sojourn.loadgen.run.run_files import begin_run, finish_run
from sojourn.loadgen.schedule.shards import Shard
from sojourn.loadgen.sweeps.calibrate import measure_point
from sojourn.metrics.compute.roofline import device_name
from sojourn.metrics.errors import CalibrationError
from sojourn.metrics.machine.client_error import (
    Calibration,
    Error,
    Point,
    beyond_capacity,
    client_error_sentence,
    store_calibration,
)
from sojourn.metrics.machine.host import hardware, versions
from sojourn.metrics.records import ClientRecord
from tests.loadgen.scenarios import CHAT, replay, scenario
from tests.loadgen.scripted_server import Script, ScriptedServer

MS = 1_000_000
LOADGEN = Path(accuracy.__file__).parents[1]


def pair(index: int, errors_ns, sent_late_ns: int = 0, **changes) -> tuple[ClientRecord, ServedRequest]:
    """A record whose stamps are off by the planted errors, and the truth."""
    due_ns = index * 10 * MS
    written = [due_ns + 100 * MS + step * 20 * MS for step in range(len(errors_ns))]
    answer = ServedRequest(f"r{index}", due_ns + MS, 7, "ok", written, written, [1] * len(written))
    record = ClientRecord(
        f"r{index}", "planted", due_ns, "ok", sent_ns=due_ns + sent_late_ns,
        chunk_ns=[ns + int(error) for ns, error in zip(written, errors_ns, strict=True)],
        chunk_tokens=[1] * len(written), prompt_tokens=7, output_tokens=len(written),
    )  # fmt: skip
    return msgspec.structs.replace(record, **changes), answer


def compared(pairs, window_ns=(0, 10**12)) -> Point:
    return compare([record for record, _ in pairs], [answer for _, answer in pairs], window_ns, 10, 50.0)


def test_planted_errors_are_found_in_each_kind():
    rng = np.random.default_rng(7)
    pairs = [pair(index, rng.uniform(0, 2 * MS, 100), sent_late_ns=3 * MS) for index in range(100)]
    found = compared(pairs)
    assert (found.requests, found.tokens, found.wrong_counts) == (100, 10_000, 0)
    assert found.stamp.bias_ms == pytest.approx(1.0, abs=0.02) and found.stamp.p99_ms == pytest.approx(1.98, abs=0.01)
    assert found.ttft.p99_ms == pytest.approx(1.98, abs=0.1)
    assert abs(found.itl.bias_ms) < 0.01 and found.itl.p99_ms == pytest.approx(2 * (1 - 0.1), abs=0.03)  # triangular
    assert found.send == Error(3.0, 3.0) and found.server_late_p99_ms == 0


def test_constant_delay_is_no_error_of_a_gap():
    found = compared([pair(index, np.full(10, 5 * MS)) for index in range(10)])
    assert found.stamp == Error(5.0, 5.0) and found.itl == Error(0.0, 0.0)


@pytest.mark.parametrize(
    "changes",
    [{"status": "error"}, {"chunk_tokens": [2] * 10}, {"output_tokens": 9}, {"prompt_tokens": 8}, {"request_id": "x"}],
)
def test_wrong_count_is_found_and_its_stamps_are_not_compared(changes):
    pairs = [pair(index, np.full(10, MS)) for index in range(4)]
    found = compared([*pairs, pair(4, np.full(10, 900 * MS), **changes)])
    assert found.wrong_counts == 1 and found.stamp.p99_ms == 1.0


def test_only_what_was_written_in_the_window_counts():
    pairs = [pair(0, [9 * MS] * 5 + [MS] * 5 + [9 * MS] * 5)]
    found = compared(pairs, (200 * MS, 300 * MS))  # writes 5 to 9 of 100, 120, … ms
    assert found.tokens == 5 and found.stamp == Error(1.0, 1.0)
    with pytest.raises(CalibrationError, match="nothing can be compared at 10 streams"):
        compared(pairs, (0, 1))


def test_fingerprint_follows_the_code_that_stamps(tmp_path, monkeypatch):
    before = client_fingerprint()
    assert before == client_fingerprint()
    monkeypatch.setattr(accuracy, "versions", lambda: versions() | {"httptools": "another"})
    assert client_fingerprint() != before
    monkeypatch.undo()
    monkeypatch.setattr(accuracy, "CLIENT_FILES", CLIENT_FILES[:-1])
    assert client_fingerprint() != before


@pytest.mark.server
def test_fingerprint_is_of_all_code_that_runs_in_the_thread_of_the_loop(tmp_path, monkeypatch):
    """A conversation with patience on kept connections is sent, and every function that is called meanwhile noted."""
    called, run = set(), SocketLoop.run

    def watched(loop, due=()):
        sys.setprofile(lambda frame, event, _: called.add(frame.f_code.co_filename))
        try:
            run(loop, due)
        finally:
            sys.setprofile(None)

    monkeypatch.setattr(SocketLoop, "run", watched)
    server = ScriptedServer(Script(gap_s=0.001)).start()
    talk = {"session": {"turns": 2, "think_time_s": 0.01, "turn_tokens": 4}, "patience_s": 9}
    replay(
        scenario({"process": "at_once", "count": 2}, [CHAT | talk], target={"connections": "reuse"}),
        server.url,
        tmp_path,
    )
    ours = {Path(file).relative_to(LOADGEN).as_posix() for file in called if Path(file).is_relative_to(LOADGEN)}
    expected = {"client/pacing.py", "client/arrival_stamps.py", "prompts/conversation.py", "replies/answer_text.py"}
    assert expected <= ours <= set(CLIENT_FILES)


@pytest.mark.server
def test_real_client_is_measured_at_a_small_load():
    found = measure_point(16, 50.0, window_s=0.8, stream_s=1.0)
    assert found.wrong_counts == 0 and found.tokens >= 400 and found.delivered == pytest.approx(1, abs=0.3)
    assert found.stamp.bias_ms > 0 and found.stamp.p99_ms >= found.stamp.bias_ms
    assert found.ttft.p99_ms > 0 and found.send.bias_ms > 0


def store_points(tmp_path, monkeypatch, *points: Point) -> None:
    """Plants a calibration of this machine and client."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store_calibration(Calibration(device_name(), client_fingerprint(), "2026-11-21", {}, 5.0, list(points)))


def planted(streams: int, tokens_per_s: float, p99_ms: float) -> Point:
    error = Error(p99_ms / 2, p99_ms)
    return Point(streams, tokens_per_s, 10, 1000, 0, 1.0, error, error, error, error, 0.5)


def test_processes_share_the_load_as_far_as_they_have_cores(tmp_path, monkeypatch):
    store_points(tmp_path, monkeypatch, planted(1, 50.0, 0.1), planted(101, 50.0, 10.1))
    streams = np.array([[0, 980 * MS, 50]] * 81)
    cores = hardware()["cores"]
    for processes in (0, 1, 2, 1000):
        shards = [Shard(number, "w", 1) for number in range(processes)]
        found = with_calibration({"lag_p50_ms": 0.2}, streams, shards)
        sharing = max(1, min(processes, cores))
        assert found["lag_p50_ms"] == 0.2 and found["calibration"]["processes"] == sharing
        assert found["calibration"]["worst_p99_ms"] == pytest.approx(max(81 / sharing / 10, 0.1))
    elsewhere = with_calibration({}, streams, [Shard(0, "w", 1, clock_uncertainty_ms=0.3)])
    assert client_error_sentence(elsewhere).startswith("not known: other hosts sent too")


@pytest.mark.parametrize("streams", [np.empty((0, 3), np.int64), np.array([[5, 5, 1]] * 9), np.array([[5, 5, 3]])])
def test_no_error_is_claimed_where_nothing_streamed(tmp_path, monkeypatch, streams):
    """Whole replies, or one chunk each: there is no stream, and nothing else was calibrated."""
    store_points(tmp_path, monkeypatch, planted(1, 50.0, 0.1), planted(101, 50.0, 10.1))
    told = with_calibration({}, streams, [])
    assert client_error_sentence(told).startswith("not known: no reply had text in more than one read")
    assert beyond_capacity(told["calibration"]) is None


@pytest.mark.server
@pytest.mark.parametrize(("p99_ms", "valid"), [(0.4, True), (7.0, False)])
def test_run_beyond_the_measured_capacity_is_not_valid(tmp_path, monkeypatch, p99_ms, valid):
    store_points(tmp_path, monkeypatch, planted(512, 1000.0, p99_ms))
    server = ScriptedServer(Script(first_token_s=0.02, gap_s=0.01)).start()
    asked = scenario(objectives=[{"ttft_ms": 60_000, "source": "made up: no lag of this machine counts"}])
    run = begin_run(tmp_path / "run", asked, 0, {})
    replay(asked, server.url, run.path)
    finish_run(run, [])
    meta = run.meta()
    assert meta["valid"] is valid
    assert meta["client_error"]["calibration"]["worst_p99_ms"] == p99_ms
    assert any("beyond its capacity" in reason for reason in meta["invalid_reasons"]) is not valid
