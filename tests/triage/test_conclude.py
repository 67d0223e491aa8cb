"""What a triage concludes: causes where the evidence carries them, and none where it does not."""

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sojourn.interop.held.held import BenchmarkFigures, Event, Figure, Held
from sojourn.metrics.errors import InputError
from sojourn.triage.conclude import _without_cause, conclude, triage_given
from sojourn.triage.document import exit_code
from sojourn.triage.terminal import MOST_LINES, WIDTH, report
from tests.interop.held.logs.test_pages import page
from tests.interop.held.shapes import SHAPES, aiperf, inference_perf, vllm

LATE = inference_perf(
    schedule_delay={"mean": 12.3, "p99": 26.0}, requested_rate=153.0, achieved_rate=105.0, send_duration=0.9
)
# 10 requests/s for 60 s against 6 that are served: those who come last wait 40 s.
OVERLOADED = vllm(
    request_rate=10.0, max_concurrency=None, num_prompts=600, completed=600, duration=102.0,
    request_throughput=600 / 102, total_output_tokens=60_600,
    output_throughput=60_600 / 102, mean_ttft_ms=20_000.0, median_ttft_ms=20_000.0,
    p99_ttft_ms=40_000.0, mean_e2el_ms=22_000.0, p99_e2el_ms=42_000.0,
)  # fmt: skip
CAUSES = {
    "late client": (LATE, "late_client"),
    "dropped": ({"metrics": {"http_req_duration": {"avg": 900.0}, "http_reqs": {"count": 100, "rate": 2.0},
                             "dropped_iterations": {"count": 40}}}, "dropped_iterations"),
    "line": ({"load_summary": {}, "successes": {"count": 900, "rate": 11.0, "queue_len": {"mean": 254},
                                                "request_latency": {"mean": 4.0}}, "failures": {}}, "server_line"),
}  # fmt: skip
# Figures that look alike and carry no cause: a steady rate below capacity, a burst, a closed loop of long prompts, the
# drain of the last long answers, failures, a tail, one benchmark that was short.
NO_CAUSE = {
    "a line that grew": OVERLOADED,
    "a line before a cap": OVERLOADED | {"mean_tpot_ms": 8.0, "median_tpot_ms": 8.0},
    "steady": vllm(request_rate=2.0, max_concurrency=None),
    "burst": OVERLOADED | {"request_rate": "inf"},
    "client's own limit": OVERLOADED | {"max_concurrency": 64},
    "long prompts in a closed loop": vllm(mean_ttft_ms=5_000.0, median_ttft_ms=5_000.0, mean_e2el_ms=7_000.0,
                                          p99_e2el_ms=8_000.0, max_concurrency=14, p99_ttft_ms=6_000.0),
    "drain": vllm(request_rate=3.0, max_concurrency=None, mean_tpot_ms=100.0, mean_e2el_ms=10_200.0, p99_e2el_ms=2e4,
                  mean_ttft_ms=200.0),
    "failures": vllm(failed=40, num_prompts=140),
    "tail": vllm(p99_ttft_ms=5_000.0),
    "slow start of the client": inference_perf(schedule_delay={"mean": 0.05, "p99": 0.4}),
}  # fmt: skip


def triaged(*documents):
    return triage_given(texts={f"{place}.json": json.dumps(each) for place, each in enumerate(documents)})


@pytest.mark.parametrize(("document", "key"), CAUSES.values(), ids=CAUSES)
def test_a_summary_names_the_cause_that_it_carries(document, key):
    found = triaged(document)
    assert [each.key for each in found.likely] == [key]
    assert found.likely[0].evidence and found.likely[0].rivals and found.state == "problem" and found.next


@pytest.mark.parametrize("document", NO_CAUSE.values(), ids=NO_CAUSE)
def test_a_summary_names_no_cause_that_something_else_could_give(document):
    found = triaged(document)
    assert not found.likely and found.next
    assert found.unknowable or found.certain


def test_a_sweep_shows_where_it_saturates():
    def at(limit, per_s, e2e):
        return vllm(max_concurrency=limit, output_throughput=101 * per_s, request_throughput=per_s,
                    duration=100 / per_s, mean_e2el_ms=e2e, mean_ttft_ms=e2e - 2000, p99_e2el_ms=e2e)  # fmt: skip

    found = triaged(at(8, 3.6, 2_200), at(16, 7.2, 2_250), at(32, 7.4, 4_300))
    assert "saturation" in [each.key for each in found.likely]
    assert any("16 to 32" in each.sentence for each in found.certain)
    assert not triaged(at(8, 3.6, 2_200), at(16, 7.2, 2_250), at(32, 14.0, 4_300)).likely


def test_requests_of_a_tool_that_cancelled_them_did_not_fail():
    cut = {"error_details": {"type": "RequestCancellationError"}, "count": 11}
    document = aiperf() | {"error_request_count": {"unit": "requests", "avg": 11}, "error_summary": [cut]}
    assert not any("failed" in each.sentence for each in triaged(document).certain)


def test_an_event_of_a_log_is_certain_and_its_cause_likely():
    event = Event(kind="out of memory", sentence="torch.OutOfMemoryError: CUDA out of memory", line=40)
    found = conclude([Held(kind="vLLM log", name="log", events=[event])], {})
    assert found.certain[0].sentence.startswith("torch.OutOfMemoryError") and found.likely[0].key == "out of memory"
    assert exit_code(found) == 6


@pytest.mark.parametrize(("text", "_"), SHAPES.values(), ids=SHAPES)
def test_an_answer_fits_a_terminal(text, _):
    lines = report(triage_given(texts={"a": text, "b": json.dumps(LATE), "c": json.dumps(OVERLOADED)})).split("\n")
    assert len(lines) <= MOST_LINES and max(map(len, lines)) <= WIDTH and lines[-1].startswith("next: ")


def test_what_cannot_be_read_is_named_beside_what_can():
    found = triage_given(texts={"good": json.dumps(LATE), "bad": "nothing of the kind"})
    assert len(found.unread) == 1 and found.unread[0].startswith("bad")
    with pytest.raises(InputError):
        triage_given(texts={"bad": "nothing of the kind"})


@settings(deadline=None, max_examples=60)
@given(st.sampled_from([text for text, _ in SHAPES.values()]), st.floats(0, 1), st.binary(max_size=8))
def test_no_damaged_file_ends_in_a_traceback(text, share, noise):
    place = int(share * len(text))
    with contextlib.suppress(InputError):
        report(triage_given(texts={"a": text[:place].encode() + noise, "b": noise + text[place:].encode()}))


def test_a_tool_of_http_times_failed_answers_too():
    """An overload that answers 503 at once looks fast there."""
    summary = {"summary": {"average": 0.1, "total": 50.0, "requestsPerSec": 2.0}, "latencyPercentiles": {"p50": 0.1},
               "statusCodeDistribution": {"200": 50, "503": 50}}  # fmt: skip
    http, tokens = (triage_given(texts={"r.json": json.dumps(each)}) for each in (summary, vllm(failed=50)))
    assert any("hold failed ones, too" in each.sentence for each in http.certain)
    assert any("latencies are of the others" in each.sentence for each in tokens.certain)


def test_two_pages_without_moments_show_what_lies_between_them():
    found = triage_given(texts={"a": page(100, 50.0, 4000), "b": page(300, 450.0, 12000)})
    assert any("Between a to b: TTFT 2.0 s" in each.sentence for each in found.certain)
    assert not any("take a second one" in each for each in found.unknowable)


def test_a_log_whose_last_task_ended_is_not_idle():
    text = (
        "2.02.000.000 I slot launch_slot_: id  3 | task 0 | processing task\n"
        "2.06.000.000 I slot print_timing: id  3 | task 0 |        eval time =   80000.00 ms /  1050 tokens (   1 ms)\n"
        "2.06.000.100 I srv  update_slots: all slots are idle\n"
    )
    found = triage_given(texts={"log": text})
    assert found.state == "cannot tell" and found.headline.startswith("Tokens come")


def test_gaps_of_a_tool_that_counts_chunks_twice_are_no_bursts_of_the_server():
    figures = {"ttft_ms": 50.0, "e2e_ms": 1050.0, "tpot_ms": 7.5, "itl_ms": 7.5, "output_tokens": 65.0}
    found = BenchmarkFigures(tool="inference-perf", figures=[
        Figure(name=name, statistic="mean", value=value, unit="ms", clock="client") for name, value in figures.items()
    ] + [Figure(name="itl_ms", statistic="median", value=0.05, unit="ms", clock="client")])  # fmt: skip
    answer = conclude([Held(kind="report", name="file", figures=found)], {})
    assert answer.state == "cannot tell" and any("2.1 chunks a token" in each.sentence for each in answer.certain)


@pytest.mark.parametrize(("running", "each"), [(1, ""), (4, ", 2.5 per request")])
def test_a_headline_carries_the_load_of_a_log_and_what_failed_of_a_benchmark(running, each):
    line = (
        "INFO 12-31 23:{s} [loggers.py:257] Engine 000: Avg prompt throughput: 1.0 tokens/s, Avg generation "
        f"throughput: 10.0 tokens/s, Running: {running} reqs, Waiting: 0 reqs, GPU KV cache usage: 50.0%, Prefix cache "
        "hit rate: 0.0%"
    )
    load = f"(10 tokens/s on average{each}, KV use 50% at most)"
    log = triage_given(texts={"log": "\n".join(line.format(s=f"59:{s:02d}") for s in range(0, 60, 10))})
    assert log.headline.endswith(load)
    moments = ("10:00", "10:10", "40:00", "40:10")  # of two loads: no rate lies between them
    apart = triage_given(texts={"log": "\n".join(line.format(s=s) for s in moments)})
    assert not apart.certain and "too far apart" in apart.headline and apart.headline.endswith(load)
    bench = triage_given(texts={"bench": json.dumps(vllm(failed=1, num_prompts=101, completed=100))})
    assert "1 of 101 requests failed" in bench.headline


@pytest.mark.parametrize(("line", "following"), [
    ("(APIServer pid=7) WARNING 11-28 21:07:51 [core_client.py:817] [shutdown] MPClient: engine core exited "
     "unexpectedly; starting cleanup", "dmesg"),
    ("(EngineCore pid=8) INFO 11-28 20:37:44 [shm_broadcast.py:871] No available shared memory broadcast block found "
     "in 60 seconds.", "py-spy dump --pid 8"),
    ("(EngineCore_DP0 pid=8) INFO 11-28 20:37:40 [core.py:1] ready\n(EngineCore_DP1 pid=9) INFO 11-28 20:37:44 "
     "[shm_broadcast.py:871] No available shared memory broadcast block found in 60 seconds.", "py-spy dump --pid PID"),
])  # fmt: skip
def test_behind_a_death_or_a_hang_no_token_comes_and_no_page_is_asked(line, following):
    head = (
        "(APIServer pid=7) INFO 11-28 20:{:02}:00 [loggers.py:259] Engine 000: Avg prompt throughput: 60.0 tokens/s, "
    )
    rest = ("Avg generation throughput: 50.0 tokens/s, Running: 4 reqs, Waiting: 0 reqs, GPU KV cache usage: 1.0%, "
            "Prefix cache hit rate: 0.0%")  # fmt: skip
    found = triage_given(texts={"server.log": "\n".join([*(head.format(minute) + rest for minute in range(5)), line])})
    assert found.state in ("problem", "stuck") and found.next.startswith(following)
    assert [each.sentence for each in found.certain if "okens come" in each.sentence] == [
        f"Before line {6 + line.count(chr(10))}: tokens come, and few requests wait"
    ]


def test_a_ttft_over_e2e_is_no_share_of_it():
    means = [Figure(name=name, statistic="mean", unit="ms", value=value, clock="server: its own /metrics")
             for name, value in (("ttft_ms", 19_600.0), ("e2e_ms", 13_000.0))]  # fmt: skip
    held = Held(kind="page of /metrics", name="p", figures=BenchmarkFigures(tool="vllm", figures=means))
    facts = [each.sentence for each in conclude([held], {}).certain]
    assert facts == ["TTFT 19.6 s is over E2E 13.0 s: some that began were aborted, or still run"]


@pytest.mark.parametrize(("bounds", "state"), [({"ttft_ms": 1000.0}, "no problem seen"), ({}, "cannot tell")])
def test_a_long_tail_within_the_objectives_is_a_fact_and_no_problem(bounds, state):
    ttfts = [0.9 if place % 50 == 25 else 0.1 for place in range(200)]
    rows = {"ttfts": ttfts, "itls": [[0.01] * 4] * 200, "input_lens": [64] * 200, "output_lens": [5] * 200,
            "start_times": [place * 0.5 for place in range(200)], "errors": [""] * 200}  # fmt: skip
    means = {"mean_ttft_ms": 116.0, "median_ttft_ms": 100.0, "p99_ttft_ms": 900.0, "mean_e2el_ms": 156.0,
             "mean_tpot_ms": 10.0, "median_tpot_ms": 10.0, "mean_itl_ms": 10.0, "p99_e2el_ms": 940.0}  # fmt: skip
    load = {"num_prompts": 200, "completed": 200, "duration": 100.0, "request_rate": 2.0, "max_concurrency": None,
            "total_input_tokens": 12_800, "total_output_tokens": 1000, "output_throughput": 10.0}  # fmt: skip
    found = triage_given(texts={"r.json": json.dumps(vllm(**rows, **means, **load))}, bounds=bounds)
    assert found.state == state, found
    assert any(each.sentence.startswith("TTFT p99 is 9.0 times its median") for each in found.certain)


def test_a_cause_is_likely_and_what_was_measured_is_certain():
    """The sentence of an overload begins with its cause."""
    measured = "3% of the requests meet their objectives"
    assert _without_cause(f"Overloaded: 9.4 requests/s arrive, and 8. no policy will help. {measured}") == measured
    assert _without_cause(f"High TTFT: {measured}, because the batch is capped") == f"High TTFT: {measured}"
