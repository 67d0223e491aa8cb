"""A trace shows what was recorded, in the format of Chrome's trace events, on one time axis."""

import gzip
import json
from collections import defaultdict

import pytest

from sojourn.interop.exported.perfetto import TraceRows, run_rows, write_trace
from sojourn.metrics.compute.kernels import Burst, Kernel, Packing, StepWindow
from sojourn.metrics.errors import RunDataError
from sojourn.metrics.records import SystemRecord
from sojourn.metrics.records.tables import row
from sojourn.metrics.run.directory import RunDirectory
from tests.metrics.random_records import random_request
from tests.metrics.run.test_directory import MS, closed_pair, record, run, step
from tests.metrics.synthetic import synthetic_run

__all__ = ["run"]  # the fixture

REQUIRED = {"X": {"name", "ts", "dur"}, "C": {"name", "ts", "args"}, "i": {"name", "ts", "s"}, "M": {"name", "args"}}


@pytest.fixture(scope="module")
def crowded(tmp_path_factory) -> RunDirectory:
    """With preemptions."""
    return synthetic_run(tmp_path_factory.mktemp("trace") / "run", plant="tiny_kv", requests=60)


def checked(path) -> dict:
    """The trace, once it was seen to be what viewers take: known phases with their keys, and slices that are nested."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as file:
        trace = json.load(file)
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    tracks = defaultdict(list)
    for event in trace["traceEvents"]:
        assert REQUIRED[event["ph"]] <= set(event), event
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0
            tracks[event["pid"], event["tid"]].append((round(event["ts"] * 1000), round(event["dur"] * 1000)))
    for slices in tracks.values():
        open_until = []
        for begin, duration in sorted(slices, key=lambda item: (item[0], -item[1])):
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or begin + duration <= open_until[-1], "slices of a track cross"
            open_until.append(begin + duration)
    return trace


def named(trace: dict, process: str) -> list[dict]:
    number = next(e["pid"] for e in trace["traceEvents"] if e["ph"] == "M" and e["args"].get("name") == process)
    return [event for event in trace["traceEvents"] if event["pid"] == number and event["ph"] != "M"]


def test_a_recorded_run_gives_a_trace_of_all_that_it_knows(crowded, tmp_path):
    rows = run_rows(crowded)
    written = write_trace(tmp_path / "trace.json", rows)
    trace = checked(tmp_path / "trace.json")
    assert written.events == len(trace["traceEvents"]) and written.dropped == 0
    requests, steps = crowded.table("requests"), crowded.table("steps")
    slices = [event for event in named(trace, "requests") if event["ph"] == "X"]
    wholes = [event for event in slices if "args" in event]
    assert sorted(event["name"] for event in wholes) == sorted(requests.request_id)
    assert {"queue", "prefill", "decode"} <= {event["name"] for event in slices}
    preempted = [event for event in named(trace, "requests") if event["ph"] == "i"]
    assert len(preempted) == steps.preempted_ids.map(len).sum() > 0
    names = [event["name"] for event in named(trace, "engine")]
    assert sum(name.startswith("step ") for name in names) == len(steps) and "schedule" in names
    assert sum(event["dur"] for event in named(trace, "device")) == pytest.approx(steps.device_ns.sum() / 1000)
    blocks = [event["args"] for event in named(trace, "memory and queue") if event["name"] == "KV blocks"]
    assert [sum(states.values()) for states in blocks] == [64] * len(steps)


def test_the_phases_of_a_request_fill_it_and_its_ledger_stands_beside_them(crowded, tmp_path):
    write_trace(tmp_path / "trace.json", run_rows(crowded))
    slices = named(checked(tmp_path / "trace.json"), "requests")
    requests = crowded.table("requests").set_index("request_id")
    origin = min(crowded.table("client").due_ns.min(), requests.arrived_ns.min(), crowded.table("steps").begin_ns.min())
    for whole in (event for event in slices if event.get("args", {}).get("ledger_ns")):
        told = requests.loc[whole["name"]]
        assert round(whole["ts"] * 1000) + origin == told.arrived_ns
        end = whole["ts"] + whole["dur"] + 1e-3
        inside = [
            event for event in slices
            if event["tid"] == whole["tid"] and "args" not in event
            and whole["ts"] <= event["ts"] and event["ts"] + event["dur"] <= end
        ]  # fmt: skip
        assert sum(event["dur"] for event in inside) == pytest.approx(whole["dur"], abs=1)
        assert whole["args"]["ledger_ns"]["compute.decode"] == told.ledger_compute_decode_ns


def test_a_first_token_lies_in_the_step_that_drew_it(crowded, tmp_path):
    write_trace(tmp_path / "trace.json", run_rows(crowded))
    trace = checked(tmp_path / "trace.json")
    ends = {(e["tid"], e["ts"] + e["dur"]) for e in named(trace, "requests") if e["name"] == "prefill"}
    steps = [(e["ts"], e["ts"] + e["dur"]) for e in named(trace, "engine") if e["name"].startswith("step ")]
    assert ends and all(any(begin <= end <= until + 1 for begin, until in steps) for _, end in ends)


def test_a_window_keeps_what_overlaps_it(crowded, tmp_path):
    whole, part = run_rows(crowded), run_rows(crowded, 2.0, 4.0)
    first = min(row["due_ns"] for row in whole.client)
    assert 0 < len(part.steps) < len(whole.steps) and 0 < len(part.requests) < len(whole.requests)
    assert all(row["end_ns"] >= first + 2e9 and row["begin_ns"] <= first + 4e9 for row in part.steps)
    with pytest.raises(RunDataError, match="nothing from 900 s"):
        run_rows(crowded, 900.0)


def test_time_0_is_the_first_request_and_not_the_machine_s_sample_of_a_loading_model(run):
    record(run, client=[closed_pair()[0]], system=[SystemRecord(-60 * 10**9, 0, None, None, None, 0)])
    whole = run_rows(run)
    assert len(whole.client) == 1 and not whole.system


def test_a_run_without_records_is_refused(run):
    with pytest.raises(RunDataError, match="no record"):
        run_rows(run)


def test_what_only_the_client_saw_is_drawn_from_its_side(run, tmp_path):
    record(run, client=[closed_pair()[0]])
    write_trace(tmp_path / "trace.json", run_rows(run))
    names = [event["name"] for event in named(checked(tmp_path / "trace.json"), "requests")]
    assert names == ["a", "lag", "to first token"]


def test_requests_that_have_not_ended_are_known_by_their_steps(tmp_path):
    steps = [row(step(number, request_ids=["open", "two#1"], new_tokens=[1, 1], past_tokens=[3, 4],
                      kinds=["decode"] * 2)) for number in (1, 2)]  # fmt: skip
    write_trace(tmp_path / "trace.json", TraceRows(steps=steps))
    shown = {event["name"]: event["dur"] for event in named(checked(tmp_path / "trace.json"), "requests")}
    assert shown == {"open": 2000, "two": 2000}


@pytest.mark.parametrize("bound", [10, 200])
def test_what_does_not_fit_is_counted(crowded, tmp_path, bound):
    rows = run_rows(crowded)
    whole = write_trace(tmp_path / "whole.json.gz", rows).events
    written = write_trace(tmp_path / "trace.json.gz", rows, max_events=bound)
    trace = checked(tmp_path / "trace.json.gz")
    assert len(trace["traceEvents"]) == written.events == bound
    assert trace["otherData"]["dropped_events"] == written.dropped == whole - bound


def test_kernels_lie_on_the_axis_of_the_steps(tmp_path):
    kernels = [Kernel("gemm_x", "gemm", MS, MS + 400_000), Kernel("draw", "sampling", MS + 500_000, 2 * MS, 7)]
    packing = Packing()
    packing.add(kernels)
    window = StepWindow(1, MS, MS + 500_000, 2 * MS)
    burst = Burst([window], [], packing.names, packing.kernels, packing.dropped, 1500, {}, "cpu", "")
    sensors = SystemRecord(ns=2 * MS, host_cpu_percent=1.0, front_cpu_percent=2.0, core_cpu_percent=None,
                           core_rss_bytes=None, host_available_bytes=0, gpu_power_watts=300.0)  # fmt: skip
    write_trace(tmp_path / "trace.json", TraceRows(steps=[row(step(1))], system=[row(sensors)]), burst)
    trace = checked(tmp_path / "trace.json")
    shown = {(e["name"], e["cat"]): (e["ts"], e["dur"]) for e in named(trace, "device") if e["cat"] != "device"}
    assert shown == {("gemm_x", "gemm"): (0, 400), ("draw", "sampling"): (500, 500)}
    assert trace["otherData"] == {
        "origin_monotonic_ns": MS, "dropped_events": 0, "clock_error_ns": 1500, "dropped_kernels": 0,
    }  # fmt: skip
    assert {e["name"]: e["args"] for e in named(trace, "memory and queue")}["GPU power, W"] == {"value": 300.0}


def test_any_request_can_be_drawn(tmp_path):
    from random import Random

    rng = Random(3)
    rows = [row(random_request(rng, number)) for number in range(200)]
    write_trace(tmp_path / "trace.json", TraceRows(requests=rows))
    checked(tmp_path / "trace.json")
