"""Readings of the kernel: psutil and our own reader read the same, and the table of seconds adds up to them."""

import os
import subprocess
import sys
import time
from threading import current_thread

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn_probe import process_times, writer

from sojourn.interop.probe import stream as theirs
from sojourn.interop.probe.machine import system_records
from sojourn.interop.probe.stream import read_streams
from sojourn.metrics.machine.process_use import process_use

COUNTS = ("cpu_ns", "queued_ns", "loop_cpu_ns", "loop_queued_ns", "loop_involuntary_switches")
WORKER = """
import sys, time
while time.process_time() < 0.3: pass
print("done", flush=True)
sys.stdin.read()
"""
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def test_reading_agrees_with_psutil_and_with_our_reader():
    """Counters only grow: each of ours lies between the others' readings before and after it."""
    own = psutil.Process()
    before, spent_before, machine_before = process_use(own.pid), spent_s(own), psutil.cpu_times()
    found = process_times.sample(True)
    after, spent_after, machine_after = process_use(own.pid), spent_s(own), psutil.cpu_times()
    assert before.main.cpu_ns <= found.loop_cpu_ns <= after.main.cpu_ns
    assert before.main.queued_ns <= found.loop_queued_ns <= after.main.queued_ns
    assert before.involuntary_switches <= found.loop_involuntary_switches <= after.involuntary_switches
    num = 1 + len(own.children())  # each is counted in ticks of its own
    assert spent_before - num * TICK_S <= found.cpu_ns / 1e9 <= spent_after + num * TICK_S
    assert found.rss_bytes == pytest.approx(sum(each.memory_info().rss for each in family(own)), rel=0.05)
    busy = [whole(each) - each.idle - each.iowait - each.steal for each in (machine_before, machine_after)]
    assert busy[0] - TICK_S <= found.machine_busy_ns / 1e9 <= busy[1] + TICK_S
    assert whole(machine_before) - TICK_S <= found.machine_whole_ns / 1e9 <= whole(machine_after) + TICK_S


def family(own: psutil.Process) -> list[psutil.Process]:
    """Other tests of this process may have started some that live."""
    return [own, *own.children()]


def spent_s(own: psutil.Process) -> float:
    return sum(each.cpu_times().user + each.cpu_times().system for each in family(own))


def whole(times) -> float:
    return sum(times) - times.guest - times.guest_nice


def test_processes_that_it_started_are_counted_with_it():
    before, alone_before = process_times.sample(True), process_times.sample(False)
    with subprocess.Popen([sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        during, alone = process_times.sample(True), process_times.sample(False)
        child.communicate(b"")
    assert during.cpu_ns - before.cpu_ns >= 0.25e9  # counted in ticks
    assert during.rss_bytes > before.rss_bytes + (1 << 20)
    assert alone.cpu_ns - alone_before.cpu_ns < 0.2e9 and alone.rss_bytes < during.rss_bytes - (1 << 20)


@pytest.mark.parametrize("role", ["core", "front"])
def test_a_front_does_not_count_the_core_that_it_has_started(tmp_path, monkeypatch, role):
    asked = []
    monkeypatch.setenv(writer.VARIABLE, str(tmp_path))
    monkeypatch.setattr(writer, "FLUSH_SECONDS", 0.01)
    monkeypatch.setattr(writer.process_times, "sample", lambda *args: asked.append((current_thread(), *args)))
    begun = writer.begin(role, "vllm", "0")
    time.sleep(0.05)
    begun.close()  # a writer of another test may still be at work
    assert {with_core for thread, with_core in asked if thread is begun._thread} == {role == "core"}


def test_machine_that_does_not_count_gives_no_record(tmp_path):
    assert process_times.sample(True, tmp_path) is None


def test_stream_has_readings_beside_the_records(tmp_path, monkeypatch):
    monkeypatch.setenv(writer.VARIABLE, str(tmp_path))
    monkeypatch.setattr(writer, "FLUSH_SECONDS", 0.01)
    monkeypatch.setattr(writer, "SAMPLE_SECONDS", 0.02)
    written = writer.begin("core", "vllm", "0")
    time.sleep(0.2)
    written.close()
    (read,) = read_streams(tmp_path)
    assert len(read.samples) >= 3
    records = system_records([read], [])
    assert len(records) == len(read.samples) - 1
    assert all(0 <= each.host_cpu_percent <= 100 and each.front_cpu_seconds is None for each in records)


steps_between = st.lists(st.tuples(*[st.integers(0, 2_000_000_000)] * len(COUNTS)), min_size=2, max_size=6)


def stream_of(role: str, growth: list[tuple[int, ...]], every_ns: int, first_ns: int) -> theirs.Stream:
    found = theirs.Stream(theirs.Start(2, role, 1, None, first_ns, 0, "vllm", "0", "0"))
    sums = [0] * len(COUNTS)
    for place, grown in enumerate(growth):
        sums = [old + new for old, new in zip(sums, grown, strict=True)]
        counts = dict(zip(COUNTS, sums, strict=True))
        found.samples.append(
            theirs.Sample(
                ns=first_ns + place * every_ns,
                rss_bytes=place,
                machine_busy_ns=place * every_ns,
                machine_steal_ns=0,
                machine_whole_ns=2 * place * every_ns,
                **counts,
            )
        )
    return found


@given(steps_between, steps_between)
def test_seconds_add_up_to_the_readings(of_core, of_front):
    """The front's counters between two readings lie between both; those of the core are the readings."""
    core = stream_of("core", of_core, 1_000_000_000, 0)
    front = stream_of("front", of_front, 1_000_000_000, 250_000_000)
    records = system_records([core], [front])
    assert [each.core_queued_ns for each in records] == [each.queued_ns for each in core.samples[1:]]
    assert all(each.host_cpu_percent == pytest.approx(50) for each in records)
    for each in records:
        between = [s for s in front.samples if abs(s.ns - each.ns) < 1_000_000_000]
        if len(between) == 2:
            assert between[0].queued_ns - 1 <= each.front_queued_ns <= between[1].queued_ns
        else:
            assert each.front_queued_ns is None
    busy = sum(each.core_cpu_percent for each in records)
    assert busy == pytest.approx((core.samples[-1].cpu_ns - core.samples[0].cpu_ns) / 1e7)
