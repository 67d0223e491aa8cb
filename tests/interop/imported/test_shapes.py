"""One workload of known times, written in the shape of each tool and version, and read back: equal to the truth."""

import json
from dataclasses import dataclass

import numpy as np
import pytest

from sojourn.interop.imported.read import read_result, write_run
from sojourn.metrics.errors import InputError
from tests.commands.program import run_program

BEGIN = 1_790_000_000.0


@dataclass(frozen=True)
class Truth:
    due: float  # seconds from BEGIN
    sent: float
    first: float
    gaps: tuple[float, ...]
    prompt: int
    failed: bool

    @property
    def end(self) -> float:
        return self.first + sum(self.gaps)


def drawn(seed: int, count: int = 30, failing: float = 0.2) -> list[Truth]:
    dice = np.random.default_rng(seed)
    found, due = [], 0.0
    for _ in range(count):
        due += dice.exponential(0.1)
        sent = due + dice.uniform(0, 0.01)
        gaps = tuple(dice.uniform(0.001, 0.05, dice.integers(0, 20)).tolist())
        found.append(Truth(due, sent, sent + dice.uniform(0.01, 0.5), gaps, int(dice.integers(1, 999)),
                           bool(dice.random() < failing)))  # fmt: skip
    return found


def guidellm_new(each, number):
    token = (
        {} if each.failed else {"first_token_iteration": BEGIN + each.first, "last_token_iteration": BEGIN + each.end}
    )
    return {"request_id": f"r{number}", "prompt_tokens": each.prompt,
            "output_tokens": None if each.failed else len(each.gaps) + 1,
            "info": {"error": "gone" if each.failed else None, "timings": {
                "targeted_start": BEGIN + each.due, "request_start": BEGIN + each.sent,
                "request_end": BEGIN + each.end, **({} if each.failed else token)}}}  # fmt: skip


def guidellm_2025(each, number):
    return {"request_id": f"r{number}", "prompt_tokens": each.prompt, "output_tokens": len(each.gaps) + 1,
            "scheduler_info": {"targeted_start_time": BEGIN + each.due, "queued_time": -1},
            "start_time": BEGIN + each.sent, "end_time": BEGIN + each.end,
            "first_token_time": -1 if each.failed else BEGIN + each.first,
            "last_token_time": -1 if each.failed else BEGIN + each.end,
            **({"error": "gone"} if each.failed else {})}  # fmt: skip


def guidellm(truth, row=guidellm_new, kind="poisson", cut=(), **more):
    """A report; `cut`: the requests that GuideLLM's limit ended."""
    rows = [(each.failed, row(each, number)) for number, each in enumerate(truth)]
    place = "args" if row is guidellm_2025 else "config"
    groups = {"successful": [each for failed, each in rows if not failed],
              "errored": [each for failed, each in rows if failed], "incomplete": list(cut)}  # fmt: skip
    benchmark = {place: {"strategy": {"type_": kind, "streams": 4, "rate": 10.0}}, "requests": groups}
    head = {} if row is guidellm_2025 else {"metadata": {"guidellm_version": "0.6.0"}}
    return json.dumps(head | {"benchmarks": [benchmark | more]})


def vllm(truth, words="gone", **more):
    document = {
        "backend": "vllm", "num_prompts": len(truth), "request_throughput": 1.0, "request_rate": 10.0,
        "input_lens": [each.prompt for each in truth],
        "output_lens": [0 if each.failed else len(each.gaps) + 1 for each in truth],
        "ttfts": [0.0 if each.failed else each.first - each.sent for each in truth],
        "itls": [[] if each.failed else list(each.gaps) for each in truth],
        "start_times": [each.sent for each in truth], "errors": [words if each.failed else "" for each in truth],
    }  # fmt: skip
    return json.dumps(document | more)


def aiperf(truth, old=False, **facts):
    stamp = lambda second: round((BEGIN + second) * 1e9)  # noqa: E731
    lines = []
    for number, each in enumerate(truth):
        metrics = {} if each.failed else {
            "ttft" if old else "time_to_first_token": {"value": (each.first - each.sent) * 1e3, "unit": "ms"},
            "request_latency": {"value": (each.end - each.sent) * 1e3, "unit": "ms"},
            "inter_chunk_latency": {"value": [gap * 1e3 for gap in each.gaps], "unit": "ms"},
            "input_sequence_length": {"value": each.prompt, "unit": "tokens"},
            "output_sequence_length": {"value": len(each.gaps) + 1, "unit": "tokens"},
        }  # fmt: skip
        times = {"timestamp_ns": stamp(each.sent), "credit_phase": "profiling"} if old else {
            "credit_issued_ns": stamp(each.due), "request_start_ns": stamp(each.sent),
            "request_end_ns": stamp(each.end), "benchmark_phase": "profiling"}  # fmt: skip
        lines.append({"metadata": {"x_request_id": f"r{number}"} | times | facts, "metrics": metrics,
                      "error": {"message": "gone"} if each.failed else None})  # fmt: skip
    return "\n".join(map(json.dumps, lines))


def inference_perf(truth, streamed=True):
    stamps = lambda each: np.cumsum([each.first, *each.gaps]).tolist() if streamed else []  # noqa: E731
    return json.dumps([
        {"scheduled_time": 5000 + each.due, "start_time": 5000 + each.sent, "end_time": 5000 + each.end,
         "error": {"error_msg": "gone"} if each.failed else None, "request": "{}", "response": "",
         "info": {"input_tokens": each.prompt, "output_tokens": 0 if each.failed else len(each.gaps) + 1,
                  "output_token_times": [] if each.failed else [5000 + stamp for stamp in stamps(each)]}}
        for each in truth
    ])  # fmt: skip


def read(tmp_path, text, name="file.json"):
    (tmp_path / name).write_text(text, encoding="utf-8")
    return read_result(tmp_path / name)[0]


SHAPES = {
    "GuideLLM of 2026": (guidellm, True), "GuideLLM 0.3": (lambda truth: guidellm(truth, guidellm_2025), True),
    "vllm": (vllm, False), "vllm, failures without text": (lambda truth: vllm(truth, ""), False),
    "AIPerf": (aiperf, True), "AIPerf of 2025": (lambda truth: aiperf(truth, old=True), False),
    "inference-perf": (inference_perf, True),
}  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape", SHAPES)
def test_drawn_workload_in_the_shape_of_a_tool_is_read_as_it_was(tmp_path, shape, seed):
    truth = drawn(seed)
    write, has_due = SHAPES[shape]
    found = read(tmp_path, write(truth))
    assert len(found.rows) == len(truth) and not found.notes
    rows = sorted(found.rows, key=lambda row: row.due_ns)
    for row, each in zip(rows, sorted(truth, key=lambda each: each.due if has_due else each.sent), strict=True):
        assert (row.status, row.error) == (("error", row.error) if each.failed else ("ok", None))
        assert (row.sent_ns - row.due_ns) / 1e9 == pytest.approx(each.sent - each.due if has_due else 0, abs=1e-6)
        assert row.prompt_tokens in (each.prompt, None)
        if each.failed:
            assert row.error and row.first_token_ns is None
            continue
        assert row.output_tokens == len(each.gaps) + 1
        assert (row.first_token_ns - row.sent_ns) / 1e9 == pytest.approx(each.first - each.sent, abs=1e-6)
        assert (row.last_byte_ns - row.sent_ns) / 1e9 == pytest.approx(each.end - each.sent, abs=1e-6)
        if row.chunk_ns:
            assert (np.diff(row.chunk_ns) / 1e9).tolist() == pytest.approx(list(each.gaps), abs=1e-6)


@pytest.mark.parametrize("row", [guidellm_new, guidellm_2025])
@pytest.mark.parametrize("kind", ["synchronous", "concurrent", "throughput", None])
def test_request_of_a_closed_loop_is_due_when_it_was_sent(tmp_path, kind, row):
    """GuideLLM gives all of them the start of the benchmark; also where the report does not name its strategy."""
    truth = [Truth(0.0, each.sent, each.first, each.gaps, each.prompt, each.failed) for each in drawn(1)]
    found = read(tmp_path, guidellm(truth, row, kind))
    assert all(row.due_ns == row.sent_ns for row in found.rows)


def test_requests_that_the_limit_of_the_tool_cut_are_no_failures_and_are_counted(tmp_path):
    truth = drawn(2, failing=0)
    cut = [guidellm_new(Truth(9, 9, 9, (), 5, True), f"cut{number}") for number in range(7)]
    for each in cut:
        each["info"]["timings"]["request_end"] = BEGIN + 12.5
    found = read(tmp_path, guidellm(truth, kind="concurrent", cut=cut))
    assert [row.status for row in found.rows] == ["ok"] * 30
    assert (
        "7 requests were in flight when GuideLLM cut them, 7 without a first token, for up to 3.5 s" in found.notes[0]
    )
    with pytest.raises(InputError, match="GuideLLM cut all 7 requests of benchmark 0 at its own limit"):
        read(tmp_path, guidellm([], cut=cut))
    cancelled = aiperf(drawn(3, 2, failing=1), was_cancelled=True).replace('"r0"', '"c0"').replace('"r1"', '"c1"')
    lines = [*aiperf(truth).splitlines(), cancelled]
    found = read(tmp_path, "\n".join(lines))
    assert len(found.rows) == 30 and "2 requests were in flight when AIPerf cut them" in found.notes[0]


def test_sample_is_named_and_its_rates_are_those_of_all_requests(tmp_path):
    """GuideLLM keeps as many of the failures as of the others: their share must not grow by it."""
    truth = drawn(4, 400, failing=0.1)
    good, bad = ([each for each in truth if each.failed is failed] for failed in (False, True))
    totals = {"successful": len(good), "errored": len(bad), "incomplete": 0}
    kept = good[:: len(good) // 40][:40] + bad
    text = guidellm(kept, metrics={"request_totals": totals})
    found = read(tmp_path, text)
    assert f"a sample: 400 requests were made, and the report lists 40 of {len(good)} successful" in found.notes[0]
    failed = sum(row.status == "error" for row in found.rows)
    assert failed / len(found.rows) == pytest.approx(len(bad) / 400, abs=0.02)
    done = run_program("import", str(tmp_path / "file.json"), "--output", str(tmp_path / "run"), "--slo", "ttft:500")
    told = json.loads((tmp_path / "run" / "diagnosis.json").read_text())
    assert "400 requests were made" in " ".join(done.stdout.split())
    true_rps = 400 / (max(each.end for each in truth) - truth[0].due)
    whole = told["goodput"][0]
    assert whole["goodput_rps"] / whole["attainment"] == pytest.approx(true_rps, rel=0.15)
    assert told["results"]["load"]["requested_rps"] == pytest.approx(true_rps, rel=0.15)
    assert any("a sample: 400" in sentence for sentence in told["warnings"])


def test_answers_that_were_not_streamed_have_an_unknown_first_token_and_are_not_late(tmp_path):
    (tmp_path / "unary.json").write_text(inference_perf(drawn(5, failing=0), streamed=False))
    for slo, state in (("ttft:500", "inconclusive"), ("ttft:500 tpot:50", "inconclusive"), ("e2e:60000", "healthy")):
        run = tmp_path / f"run-{slo.replace(':', '-').replace(' ', '-')}"
        run_program("import", str(tmp_path / "unary.json"), "--run-dir", str(run), "--slo", slo)
        told = json.loads((run / "diagnosis.json").read_text())
        assert told["state"] == state, told["headline"]
        assert "late" not in told["headline"] and "ttft_ms" not in told["goodput"][0]["attainment_by_objective"]


@pytest.mark.parametrize(("told", "says"), [({"failed": 9}, "that 9 requests failed"), ({"completed": 30}, "that 0")])
def test_vllm_file_that_counts_its_failures_otherwise_says_so(tmp_path, told, says):
    truth = drawn(6)
    number = sum(each.failed for each in truth)
    assert read(tmp_path, vllm(truth, failed=number, completed=30 - number)).notes == []
    (note,) = read(tmp_path, vllm(truth, **told)).notes
    assert says in note and f"its requests show {number}" in note


def broken(text, change):
    document = json.loads(text)
    change(document)
    return json.dumps(document)


def entries(document):
    return document["benchmarks"][0]["requests"]["successful"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (broken(guidellm(drawn(1)), lambda d: entries(d)[1].update(request_id="r0")), "'r0' stands twice"),
        (aiperf(drawn(1)) + "\n" + aiperf(drawn(1)), "stands twice in the AIPerf file"),
        (broken(guidellm(drawn(1)), lambda d: entries(d)[0]["info"]["timings"].update(request_start=1.79e12)),
         "not a time between the years 2000 and 2100.* in another unit"),
        (broken(guidellm(drawn(1)), lambda d: entries(d)[0]["info"]["timings"].update(request_end=BEGIN - 5)),
         "its last byte is .* s before its last token"),
        (aiperf(drawn(1)).replace('"unit": "ms"', '"unit": "s"', 1), "mixes units of time"),
        (broken(vllm(drawn(1)), lambda d: d["itls"][0].append(float("nan"))), r"itls\[0\] has an entry that is no"),
        (broken(vllm(drawn(1)), lambda d: d["itls"].__setitem__(0, [0.1, -0.09])), "before its"),
        (broken(vllm(drawn(1)), lambda d: d["start_times"].__setitem__(0, 1e15)), "not a time that can be held"),
        (broken(vllm(drawn(1)), lambda d: d.pop("start_times")), "not when it was sent.*since January 2026"),
    ],
)  # fmt: skip
def test_times_that_cannot_be_true_are_refused_with_the_request_and_the_field(tmp_path, text, says):
    with pytest.raises(InputError, match=says):
        read(tmp_path, text)


def test_integers_written_as_strings_and_a_byte_order_mark_are_read(tmp_path):
    lines = [json.loads(line) for line in aiperf(drawn(7)).splitlines()]
    for line in lines:
        for name in ("credit_issued_ns", "request_start_ns", "request_end_ns"):
            line["metadata"][name] = str(line["metadata"][name])
    strings = read(tmp_path, "\ufeff" + "\r\n".join(map(json.dumps, lines)) + "\r\n")
    assert strings.rows == read(tmp_path, aiperf(drawn(7))).rows


def test_run_of_closed_loop_says_that_it_is_one(tmp_path):
    found = read(tmp_path, guidellm(drawn(8), kind="concurrent"))
    assert write_run(found, tmp_path / "run", "file").meta()["arrivals"]["loop"] == "closed"


def test_benchmark_of_a_sweep_that_cannot_be_read_leaves_the_others_alone(tmp_path):
    document = json.loads(guidellm(drawn(9)))
    whole = document["benchmarks"][0]
    empty = whole | {"requests": {"successful": [], "errored": [], "incomplete": [guidellm_new(drawn(9)[0], "x")]}}
    document["benchmarks"] = [whole, empty, whole]
    (tmp_path / "sweep.json").write_text(json.dumps(document))
    first, second, third = read_result(tmp_path / "sweep.json")
    assert len(first.rows) == len(third.rows) == 30
    with pytest.raises(InputError, match="GuideLLM cut all 1 requests of benchmark 1"):
        write_run(second, tmp_path / "run", "sweep.json")
    said = run_program("import", str(tmp_path / "sweep.json"), "--output", str(tmp_path / "run")).stderr
    assert "holds 3 benchmarks" in said and "choose one with --benchmark" in said


def test_warm_up_and_cool_down_of_guidellm_are_left_out_as_it_does(tmp_path):
    truth = drawn(10, failing=0)
    begin, end = truth[4].end + 1e-3, truth[-4].sent - 1e-3
    times = {"measure_start_time": BEGIN + begin, "measure_end_time": BEGIN + end}
    found = read(tmp_path, guidellm(truth, scheduler_metrics=times))
    inside = [each for each in truth if each.end >= begin and each.sent <= end]
    assert 0 < len(inside) < 30 and len(found.rows) == len(inside)
    assert f"{30 - len(inside)} requests of the warm-up or cool-down are left out" in found.notes
