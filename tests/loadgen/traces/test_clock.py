"""The unit of timestamps and the size of hashed blocks are those that the file implies, or the file is refused."""

import json

import numpy as np
import pytest

from sojourn.loadgen.errors import ScenarioError
from sojourn.loadgen.scenario.vllm_flags import parse
from sojourn.loadgen.schedule.facts import rate_to_come, workload_facts
from sojourn.loadgen.traces.clock import UNITS, change_of_unit
from sojourn.loadgen.traces.reader import TRACE_FOLDER, read_trace
from sojourn.loadgen.traces.row import Window
from sojourn.metrics.errors import InputError
from tests.loadgen.trace_files import BURST_SIX, write


def lines_of(path, stamps, tokens=20, size=None):
    ids = {} if size is None else {"hash_ids": list(range(-(-tokens // size)))}
    rows = [{"timestamp": stamp, "input_length": tokens, "output_length": 5} | ids for stamp in stamps]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("rate", [0.5, 2.0, 15.0])
@pytest.mark.parametrize("size", [None, 512])
@pytest.mark.parametrize("epoch", [0, 1_790_000_000])
@pytest.mark.parametrize("unit", UNITS)
def test_drawn_arrivals_written_in_any_unit_are_read_at_their_rate_or_refused(tmp_path, unit, epoch, size, rate):
    times = np.cumsum(np.random.default_rng(round(rate * 10)).exponential(1 / rate, 300))
    stamps = [epoch + time if unit == "seconds" else round((epoch + time) / UNITS[unit]) for time in times]
    path = lines_of(tmp_path / "t.jsonl", stamps, 1000, size)
    try:
        found = read_trace(path)
    except ScenarioError as refused:  # 15 per second of microseconds is one in 67 s of milliseconds
        assert (unit, epoch, rate) in {("microseconds", 0, 15.0), ("nanoseconds", 0, 15.0)}, refused
        return
    assert [row.offset_s for row in found.rows] == pytest.approx((times - times[0]).tolist(), abs=2e-3)


@pytest.mark.parametrize(
    "stamp", ["2026-03-02T10:00:{:06.3f}", "2026-03-02T10:00:{:06.3f}Z", "2026-03-02T12:00:{:06.3f}+02:00"]
)
def test_iso_times_with_and_without_zone_are_read(tmp_path, stamp):
    found = read_trace(lines_of(tmp_path / "t.jsonl", [stamp.format(second) for second in (1.5, 0.25, 30)]))
    assert [row.offset_s for row in found.rows] == pytest.approx([0, 1.25, 29.75])


@pytest.mark.parametrize(
    ("stamps", "says"),
    [
        (range(0, 1000, 10), "in seconds that is 0.1 requests per second, in milliseconds 100.*seconds_per_unit"),
        ([0.5, 100.5, 200.5], "in seconds that is 0.01"),
        ([0, "2026-03-02T10:00:00"], "line 2: timestamp is .2026-03-02T10:00:00., of another kind than before"),
        (["soon"], "line 1: timestamp is 'soon'; it must be a number or an ISO time"),
        ([-1], "timestamp is -1; it must be at least 0"),
    ],
)  # fmt: skip
def test_times_that_imply_no_unit_are_refused_with_what_each_would_mean(tmp_path, stamps, says):
    path = lines_of(tmp_path / "t.jsonl", stamps)
    with pytest.raises(ScenarioError, match=says):
        read_trace(path)


@pytest.mark.parametrize("epoch", [0, 1_700_000_000], ids=["from 0", "dates"])
@pytest.mark.parametrize("rate", [0.2, 3.0, 15.0])
@pytest.mark.parametrize("at", [20, 100, 180])
@pytest.mark.parametrize("units", [(1, 1e3), (1e3, 1), (1, 1e6), (1e3, 1e9)], ids=str)
def test_times_that_change_their_unit_part_way_are_refused(tmp_path, units, at, rate, epoch):
    times = epoch + np.cumsum(np.random.default_rng(at).exponential(1 / rate, 200))
    stamps = [round(time * units[number >= at], 3) for number, time in enumerate(times)]
    with pytest.raises(ScenarioError, match=f"change their unit part-way. From request {at + 1} on"):
        read_trace(lines_of(tmp_path / "t.jsonl", stamps))
    assert len(read_trace(lines_of(tmp_path / "t.jsonl", stamps), window=Window(seconds_per_unit=1e-3)).rows) == 200


@pytest.mark.parametrize("first, second", [(1.0, 1000.0), (1000.0, 1.0)])
def test_two_traces_of_different_units_in_one_file_are_refused(tmp_path, first, second):
    stamps = [first * n for n in range(50)] + [second * n for n in range(50)]
    with pytest.raises(ScenarioError, match="part-way"):
        read_trace(lines_of(tmp_path / "t.jsonl", stamps))


@pytest.mark.parametrize(
    "stamps",
    [
        [*range(7), *range(1000, 60_000, 1000)],  # a burst, in milliseconds, and then one request per second
        [1_700_000_000 + at for at in [*range(0, 3000, 60), *(3000 + n / 20 for n in range(500))]],  # quiet, then busy
    ],
    ids=["burst", "dates"],
)  # fmt: skip
def test_load_that_changes_is_no_change_of_the_unit(stamps):
    assert change_of_unit(stamps) is None


def test_iso_times_behind_thousands_of_numbers_are_refused(tmp_path):
    stamps = [1000.0 * n for n in range(10_050)] + ["2026-03-02T10:00:00"]
    with pytest.raises(ScenarioError, match=r"line 10051: timestamp is .* of another kind than before"):
        read_trace(lines_of(tmp_path / "t.jsonl", stamps))


def test_other_forms_have_one_unit_too(tmp_path):
    path = tmp_path / "plain.jsonl"
    path.write_text("".join(json.dumps({"at_s": at, "prompt_tokens": 5, "output_tokens": 5}) + "\n"
                            for at in [*range(1, 30), *range(30_000, 60_000, 1000)]))  # fmt: skip
    with pytest.raises(ScenarioError, match=r"plain.jsonl: .* \(30000, after 29\) a unit is a 1,000th of it"):
        read_trace(path)


@pytest.mark.parametrize("seed", range(40))
def test_bursts_pauses_days_and_files_without_order_have_one_unit(seed):
    """Gaps that vary by ten thousand, pauses of hours, rates that rise: a trace as it comes."""
    random = np.random.default_rng(seed)
    kinds = [
        random.exponential(1.0, 300), random.lognormal(0, 2.5, 300), random.weibull(0.4, 300),
        np.where(random.random(300) < 0.02, 20_000.0, random.exponential(1.0, 300)),
        np.where(np.arange(300) % 30 == 29, random.exponential(30.0, 300), random.exponential(0.01, 300)),
        np.concatenate([random.exponential(30.0, 150), random.exponential(1.0, 150)]),
    ]  # fmt: skip
    for gaps in kinds:
        times = np.cumsum(gaps)
        for stamps in (times, np.floor(times), times + 1_700_000_000, random.permutation(times)):
            assert change_of_unit(stamps) is None


def test_unit_that_is_said_is_taken(tmp_path):
    path = lines_of(tmp_path / "t.jsonl", range(0, 1000, 10))
    assert read_trace(path, window=Window(seconds_per_unit=0.0264)).end_s == pytest.approx(990 * 0.0264)
    with pytest.raises(ScenarioError, match="of the form burstgpt, which fixes its times"):
        read_trace(write(tmp_path, "burst6.csv"), window=Window(seconds_per_unit=1.0))


def test_equal_times_and_a_single_row_need_no_unit(tmp_path):
    for stamps in ([7], [7] * 5, [0.5] * 3):
        assert [row.offset_s for row in read_trace(lines_of(tmp_path / "t.jsonl", stamps)).rows] == [0] * len(stamps)


@pytest.mark.parametrize("size", [16, 64, 512, 1024])
def test_size_of_hashed_blocks_is_the_one_that_all_lengths_fit(tmp_path, size):
    path = tmp_path / "t.jsonl"
    rows = [
        {"timestamp": 500 * n, "input_length": length, "output_length": 1, "hash_ids": [*range(-(-length // size))]}
        for n, length in enumerate((5_000, 9_999, 20_480))
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    found = read_trace(path)
    assert found.block_tokens == size and {row.block_tokens for row in found.rows} == {size}
    with pytest.raises(ScenarioError, match="blocks of 333 tokens"):
        read_trace(path, window=Window(hash_tokens=333))


def test_bundled_trace_stays_in_milliseconds_and_blocks_of_512():
    found = read_trace(TRACE_FOLDER / "mooncake_conversation_trace.jsonl")
    assert (round(found.end_s), found.block_tokens) == (3537, 512)


FLAGS = "--base-url http://127.0.0.1:9 --dataset-name timed_trace --num-prompts 100 --dataset-path"


def test_flags_of_vllm_for_a_timed_trace_mean_what_they_mean_there(tmp_path):
    path = lines_of(tmp_path / "t.jsonl", range(0, 1000, 10), tokens=40, size=16)
    more = ["--self-timed", "--timed-trace-chunk-hash-size", "16", "--timed-trace-sec-multiplier", "0.02"]
    flags = parse([*FLAGS.split(), str(path), *more])
    assert (flags.scenario.arrivals.seconds_per_unit, flags.scenario.arrivals.hash_tokens) == (0.02, 16)
    sentence = rate_to_come(flags.scenario, 0)
    assert sentence == "t.jsonl (its timestamps are units of 0.02 s): 100 requests in 19.8 s, 5 per second"
    with pytest.raises(InputError, match="rename the column"):
        parse([*FLAGS.split(), str(path), "--timed-trace-label-timestamp", "when"])
    for flag in (["--self-timed"], ["--timed-trace-sec-multiplier", "1"]):
        with pytest.raises(InputError, match="is of --dataset-name timed_trace, but it is random"):
            parse(["--dataset-name", "random", *flag])
    with pytest.raises(ScenarioError, match="--timed-trace-sec-multiplier"):
        parse([*FLAGS.split(), str(path), "--timed-trace-sec-multiplier", "-1"])


def test_rows_that_vllm_would_leave_out_are_named(tmp_path):
    path = tmp_path / "burst.csv"
    path.write_text(f"{BURST_SIX}\n5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,1087,9,1096,API log\n")
    flags = parse(["--dataset-name", "burstgpt", "--dataset-path", str(path), "--num-prompts", "2"])
    assert any(
        "leaves out those of other models than GPT-4" in note for note in workload_facts(flags.scenario, 0)["notes"]
    )
