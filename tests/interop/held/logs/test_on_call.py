"""What an engineer on call found wrong in real lines: engines add up, counts are those that lines state, and a pasted
error is evidence."""

from datetime import UTC, datetime

import pytest

from sojourn.interop.held.registry import read_held

LINE = (
    "(APIServer pid=1) INFO {at} [loggers.py:257] Engine {engine:03d}: Avg prompt throughput: 16.5 tokens/s, Avg "
    "generation throughput: {rate} tokens/s, Running: {running} reqs, Waiting: {waiting} reqs, GPU KV cache usage: "
    "{kv}%, Prefix cache hit rate: 0.0%\n"
)
PREEMPTED = (
    "WARNING {at} scheduler.py:1242] Sequence group cmpl-1 is preempted by PreemptionMode.RECOMPUTE mode because there "
    "is not enough KV cache space. total_num_cumulative_preemption={count}\n"
)
OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 232.00 MiB. GPU 0 has a total capacity"


def test_lines_of_several_engines_add_up_and_the_fullest_pool_counts():
    text = "".join(
        LINE.format(at=f"11-28 06:16:{second:02d}", engine=engine, rate=rate, running=running, waiting=waiting, kv=kv)
        for second in (10, 20, 30)
        for engine, rate, running, waiting, kv in ((0, 1157.2, 51, 117, 100.0), (1, 809.3, 31, 108, 98.6))
    )
    cut = text[: text.rindex("(APIServer")]  # the last look lacks an engine
    for content in (text, cut):
        [held] = read_held(content, "log")
        for statistic in ("mean", "last"):
            assert held.figures.value("running", statistic) == 82 and held.figures.value("waiting", statistic) == 225
        assert held.figures.value("output_tokens_per_s") == pytest.approx(1966.5)
        assert held.figures.value("kv_use") == 1.0


@pytest.mark.parametrize("day", ["01-20", "06-10", "09-08", "09-10", "12-31"])
def test_a_moment_without_a_year_is_one_of_a_wall_clock_all_year_round(day):
    text = "".join(
        LINE.format(at=f"{day} 11:58:{second}", engine=0, rate=40.0, running=2, waiting=0, kv=8.0)
        for second in (40, 50)
    )
    [held] = read_held(text, "log")
    first = min(row["ns"] for row in held.series)
    assert f"{datetime.fromtimestamp(first / 1e9, UTC):%m-%d %H:%M:%S}" == f"{day} 11:58:40" and first > 10**18


def test_preemptions_are_as_many_as_their_lines_state():
    text = LINE.format(at="11-28 06:16:10", engine=0, rate=40.0, running=2, waiting=9, kv=99.0)
    text += "".join(PREEMPTED.format(at=f"11-28 06:16:1{number}", count=50 * number + 1) for number in range(3))
    [held] = read_held(text, "log")
    assert [event.times for event in held.events if event.kind == "preemption"] == [101]
    assert not any("preemptions" in each for each in held.missing)


@pytest.mark.parametrize(
    "more", ["", "\n\npython3 -m vllm.entrypoints.openai.api_server --model m --max-model-len 9\n"]
)
def test_a_pasted_error_is_evidence_with_and_without_its_command(more):
    found = read_held(OUT_OF_MEMORY + more, "paste")
    assert any(event.kind == "out of memory" for each in found for event in each.events)
    assert len(found) == 1 + bool(more)


def test_another_number_of_requests_sent_at_once_is_another_load():
    from sojourn.interop.held.differences import differences
    from sojourn.interop.held.held import BenchmarkFigures, Figure, Held

    def held(requests: float, ttft_ms: float, load: dict) -> Held:
        shown = (("ttft_ms", "mean", ttft_ms, "ms"), ("requests", "total", requests, "requests"))
        figures = [Figure(name=name, statistic=how, value=value, unit=unit, clock="client: send to first text")
                   for name, how, value, unit in shown]  # fmt: skip
        return Held(kind="summary", name="x", figures=BenchmarkFigures(tool="t", figures=figures, load=load))

    for load, verdict in (
        ({}, "cannot tell"),
        ({"request_rate": "inf"}, "cannot tell"),
        ({"request_rate": 4}, "worse"),
    ):
        found = differences(held(250, 1000, load), held(400, 3000, load))
        assert found.verdict == verdict and any("250 → 400" in note for note in found.notes) is (verdict != "worse")
    assert differences(held(250, 1000, {}), held(260, 3000, {})).verdict == "worse"
