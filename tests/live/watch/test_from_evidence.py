"""A log and saved pages become a run that the watch's rules judge, with the times at which it was bad."""

import pytest

from sojourn.interop.held.registry import read_held
from sojourn.live.watch.from_evidence import write_evidence
from sojourn.live.watch.recorded import diagnose_recorded
from sojourn.metrics.errors import InputError

ARGUMENTS = "INFO 03-02 10:00:00 [utils.py:1] non-default args: {'max_num_seqs': 4}"
LINE = (
    "INFO 03-02 {clock} [loggers.py:257] Engine 000: Avg prompt throughput: 10.0 tokens/s, Avg generation throughput: "
    "{out} tokens/s, Running: {running} reqs, Waiting: {waiting} reqs, GPU KV cache usage: {kv}%, Prefix cache hit "
    "rate: 0.0%"
)


def log(*minutes):
    """Each minute as running, waiting, KV percent, tokens/s."""
    lines = [ARGUMENTS]
    for minute, (running, waiting, kv, out) in enumerate(minutes):
        lines += [
            LINE.format(clock=f"10:{minute:02d}:{s:02d}", running=running, waiting=waiting, kv=kv, out=out)
            for s in range(0, 60, 10)
        ]
    return "\n".join(lines)


CALM, LINE_AT_CAP, FULL = (3, 0, 10.0, 50.0), (4, 30, 10.0, 60.0), (9, 30, 99.8, 60.0)


def diagnosis(text, tmp_path, **more):
    return diagnose_recorded(write_evidence(read_held(text, "server.log"), tmp_path / "run", {}, **more))


def test_a_line_while_the_batch_stands_at_its_setting_is_named_with_its_times(tmp_path):
    found = diagnosis(log(CALM, CALM, LINE_AT_CAP, LINE_AT_CAP, CALM, CALM), tmp_path)
    assert found.state == "overloaded"
    assert "never more than 4 run" in found.headline and "max_num_seqs is 4" in found.headline
    assert "from 10:02" in found.headline and "to 10:04" in found.headline


def test_a_line_while_the_pool_is_full_is_the_pools(tmp_path):
    found = diagnosis(log(CALM, CALM, FULL, FULL), tmp_path)
    assert found.state == "degraded" and "the KV cache has no room" in found.headline
    assert "preemptions" not in found.headline  # no line counts them


@pytest.mark.parametrize("minutes", [(CALM,) * 4, (CALM, (3, 1, 40.0, 50.0), CALM, CALM), ((0, 0, 0.0, 0.0),) * 3])
def test_calm_is_no_fault_and_never_called_healthy_without_latencies(minutes, tmp_path):
    found = diagnosis(log(*minutes), tmp_path)
    assert found.state == "inconclusive" or "Idle" in found.headline


def test_requests_that_stand_still_are_stuck(tmp_path):
    still = (4, 2, 50.0, 0.0)
    text = log(CALM, still, still, still).replace("prompt throughput: 10.0", "prompt throughput: 0.0")
    found = diagnosis(text, tmp_path)
    assert found.state == "stuck" and "4 running and 2 waiting" in found.headline


PAGE = """\
vllm:generation_tokens_total{{engine="0"}} {tokens}
vllm:num_requests_running{{engine="0"}} 2
vllm:num_requests_waiting{{engine="0"}} 0
vllm:request_success_total{{engine="0",finished_reason="length"}} {ended}
process_start_time_seconds {started}
"""


def pages(*started):
    return [held for place, moment in enumerate(started) for held in read_held(
        PAGE.format(tokens=100 * place, ended=10 * place, started=moment), f"{place}.prom")]  # fmt: skip


def test_pages_without_moments_take_the_time_between_them(tmp_path):
    run = write_evidence(pages(1, 1, 1), tmp_path / "run", {}, every_s=30.0)
    assert sorted(set(run.table("scrapes")["ns"])) == [0, 30 * 10**9, 60 * 10**9]


@pytest.mark.parametrize(("started", "every_s", "why"), [
    ((1,), 30.0, "give two"), ((1, 1), None, "--every"), ((1, 2), 30.0, "compare"),
])  # fmt: skip
def test_pages_that_are_no_series_are_refused(started, every_s, why, tmp_path):
    with pytest.raises(InputError, match=why):
        write_evidence(pages(*started), tmp_path / "run", {}, every_s)


def test_pages_with_moments_are_a_series_in_whatever_order_they_are_given(tmp_path):
    first, second = (
        read_held(f"2026-11-28T16:0{minute}:00Z\n" + PAGE.format(tokens=100 * minute, ended=10, started=1), "page")[0]
        for minute in range(2)
    )
    run = write_evidence([second, first], tmp_path / "run", {})
    assert run.table("scrapes")["ns"].is_monotonic_increasing and run.table("scrapes")["ns"].nunique() == 2
    with pytest.raises(InputError, match="oldest first"):
        write_evidence(pages(1, 1)[::-1], tmp_path / "none", {}, every_s=30.0)
