"""Benchmarks count their figures right, step records explain them, and bad options are refused."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from bench import shapes, workloads
from bench.command import _check_writable, _peers
from bench.engines import client
from bench.report import tables
from bench.report.breakdown import Steps, complaint, explain, steps_of_records
from bench.results import BenchError, Point, Report, read_report, write_report
from bench.variants import check_settings, named_variants
from sojourn.engine.options import assignments
from sojourn.metrics.compute.roofline import (
    Ceilings,
    Gemm,
    ceilings_path,
    device_name,
    store_ceilings,
)
from sojourn.metrics.errors import InputError
from tests.engine.harness import drain, hand_over, make_engine, submit
from tests.engine.token.models.test_random_weights import DENSE, config_alone

ROOT = Path(__file__).parents[2]
NOT_HERE = {
    ROOT / "bench" / "fuzz" / "one.py",  # libFuzzer takes a process over, and the target is in its arguments
    # vLLM imports them in its own environment; they replace parts of the probe
    ROOT / "bench" / "probe" / "timed.py",
    ROOT / "bench" / "probe" / "switched.py",
}
CEILINGS = Ceilings("a device", 2, "2026-11-21", {}, 2e9, 1e9, 64, [Gemm("float32", 1, 1e9), Gemm("float32", 64, 8e9)])


def report_of(*points: Point) -> Report:
    return Report("online", "small", "sojourn dev bench online small", "2026-11-21T00:00:00", {"cpu": "c", "cores": 2},
                  {}, points=list(points), ceilings=CEILINGS)  # fmt: skip


@pytest.mark.parametrize("path", sorted({*(ROOT / "bench").rglob("*.py")} - NOT_HERE), ids=lambda path: path.stem)
def test_every_benchmark_can_be_imported(path):
    """Most of them run only by hand."""
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    assert module.__doc__


def test_the_nano_vllm_workload_is_the_published_one():
    work = workloads.nano_vllm()
    assert (len(work.prompts), work.input_tokens, work.output_tokens, work.longest) == (256, 142_827, 133_966, 2_011)
    assert len(work.prompts[0]) == 964 and work.prompts[0][:3] == [6311, 6890, 663]
    assert work.output_lens[:5] == [845, 312, 607, 843, 500] and work.temperature == 0.6


@pytest.fixture(scope="module")
def measured() -> tuple[Steps, int, int]:
    """Steps of the bundled model, and when they began and ended."""
    engine, published = make_engine("tiny-model")
    hand_over(engine, [submit(f"r{index}", [5] * (20 + index), 8) for index in range(4)])
    drain(engine)
    records = published.records
    return steps_of_records(records), records[0].begin_ns, records[-1].end_ns


def test_step_records_explain_the_wall_time_by_host_and_by_device(measured):
    steps, begin_ns, end_ns = measured
    told = explain(steps, begin_ns, end_ns)
    assert complaint(told) is None and told["steps"] == steps.count
    assert told["wall"] == pytest.approx((end_ns - begin_ns) / 1e6)
    later = explain(steps, begin_ns - 10**9, end_ns + 10**9)  # before the first and after the last step
    assert complaint(later) is None and later["outside"] == pytest.approx(2000)


@pytest.mark.parametrize("column", ["stage_wait_ns", "device_ns", "gap_ns"])
def test_an_account_that_lacks_time_is_told(measured, column):
    steps, begin_ns, end_ns = measured
    columns = dict(steps.columns)
    columns[column] = columns[column] - 0.05 * (end_ns - begin_ns) / steps.count
    account = "host" if column.startswith("stage") else "device"
    assert f"the {account} accounts" in complaint(explain(Steps(columns), begin_ns, end_ns))


def run_bench(tmp_path: Path, *arguments: str) -> Report:
    """`sojourn dev bench` as a user runs it, on a machine whose ceilings are known."""
    ceilings = msgspec.structs.replace(CEILINGS, device=device_name())
    store_ceilings(ceilings, tmp_path / "sojourn" / ceilings_path(ceilings.device).name)
    command = [sys.executable, "-m", "sojourn", "dev", "bench", *arguments, "--json", str(tmp_path / "report.json")]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)}, capture_output=True, text=True,
        timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return read_report(tmp_path / "report.json")


@pytest.mark.slow
def test_offline_runs_each_variant_in_turns_and_its_records_explain_it(tmp_path):
    folder = str(config_alone(tmp_path, DENSE))
    arguments = ("--variant", "small steps:max_num_batched_tokens=256", "--repeats", "2", "--set", "threads=1")
    report = run_bench(tmp_path, "offline", folder, *arguments)
    assert [point.engine for point in report.points] == ["sojourn", "small steps"] and not report.notes
    for point in report.points:
        assert len(point.figures["output_tokens_per_s"]) == len(point.breakdowns) == 2
        assert all(told["steps"] > 128 for told in point.breakdowns)  # the longest output
    assert report.at("small steps", "cpu").settings["max_num_batched_tokens"] == 256
    assert report.workload["output_tokens"] == 5101 and report.command.startswith("sojourn dev bench offline")


@pytest.mark.slow
def test_online_measures_a_server_at_every_concurrency(tmp_path):
    folder = config_alone(tmp_path, DENSE)
    words = {f"w{index}": index for index in range(DENSE["vocab_size"])}
    Tokenizer(WordLevel(words, "w0")).save(str(folder / "tokenizer.json"))
    arguments = ("-c", "1", "-c", "4", "--burst", "--repeats", "1", "--output-len", "16", "--set", "threads=1")
    report = run_bench(tmp_path, "online", str(folder), *arguments)
    assert [point.point for point in report.points] == ["c=1", "c=4", "64 at once"] and not report.notes
    for point in report.points[:2]:
        assert 0 < point.median("ttft_p50_ms") <= point.median("ttft_p99_ms") and "itl_p50_ms" in point.figures
        assert 0 < point.median("roofline_percent") < 100


def exchange_of(*reads: tuple[int, bytes]) -> client.Exchange:
    return client.Exchange(sent_ns=0, ended_ns=reads[-1][0], reads=list(reads))


def chunk(event: dict | str) -> bytes:
    line = f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()
    return f"{len(line):x}\r\n".encode() + line + b"\r\n"


def test_the_client_stamps_texts_and_counts_by_usage():
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    first, held, last = (chunk({"choices": [{"text": text}]}) for text in ("a", "", "bc"))
    usage = chunk({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}})
    end = chunk("[DONE]") + b"0\r\n\r\n"
    whole = first + held + last  # the third read ends in the middle of an event
    done = exchange_of((5, head), (10, whole[:-4]), (30, whole[-4:] + usage), (40, end))
    answer = client.parse(done)
    assert (answer.status, answer.prompt_tokens, answer.output_tokens) == (200, 3, 4)
    assert answer.text_ns == [10, 30]
    told = client.figures(0, 40, [done], [answer], stream=True)
    assert told["ttft_p50_ms"] == pytest.approx(10e-6) and told["itl_p99_ms"] == pytest.approx(20e-6)
    assert told["output_tokens_per_s"] == pytest.approx(4 / 40e-9)


def test_the_client_tells_answers_that_are_no_measurement():
    order = {"prompts": [[1, 2, 3]], "output_lens": [4], "stream": False}
    body = b'{"usage": {"prompt_tokens": 3, "completion_tokens": 4}}'
    good = exchange_of((1, b"HTTP/1.1 200 OK\r\n\r\n" + body))
    assert client.fault(order, [client.parse(good)]) is None
    short = exchange_of(
        (1, b"HTTP/1.1 200 OK\r\n\r\n" + body.replace(b'"completion_tokens": 4', b'"completion_tokens": 2'))
    )
    assert "asked for 4 tokens and was given 2" in client.fault(order, [client.parse(short)])
    refused = exchange_of((1, b"HTTP/1.1 400 Bad Request\r\n\r\nno such model"))
    assert "answered 400: no such model" in client.fault(order, [client.parse(refused)])


def test_a_report_survives_its_file_and_compares_repeat_by_repeat(tmp_path):
    ours = Point("sojourn", "c=8", figures={"output_tokens_per_s": [100.0, 50.0, 80.0]})
    peer = Point("peer", "c=8", peer=True, version="1.2", figures={"output_tokens_per_s": [50.0, 20.0, 80.0]})
    report = report_of(ours, peer)
    write_report(report, tmp_path / "r.json")
    assert read_report(tmp_path / "r.json") == report
    assert report.ratios("sojourn", "peer", "c=8", "output_tokens_per_s") == [2.0, 2.5, 1.0]
    text = tables.markdown(report)
    assert "| peer | c=8 | 50.0 (20.0–80.0) | 2.00× (1.00–2.50) |" in text
    assert "`sojourn dev bench online small`" in text and "2026-11-21" in text and "peer 1.2" in text
    with pytest.raises(BenchError, match="cannot be written"):
        write_report(report, tmp_path / "absent" / "r.json")


def test_tables_are_placed_between_their_marks(tmp_path):
    document = tmp_path / "performance.md"
    document.write_text("# A\n<!-- begin cpu -->\nold\n<!-- end cpu -->\nrest\n")
    tables.place(document, "cpu", "new")
    assert document.read_text() == "# A\n<!-- begin cpu -->\nnew\n<!-- end cpu -->\nrest\n"
    with pytest.raises(BenchError, match="begin gpu"):
        tables.place(document, "gpu", "new")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda folder: shapes.model_to_bench("nowhere", folder), ["nowhere", "qwen3-14b"]),
        (lambda folder: assignments(["threads"], "--set"), ["--set 'threads'", "KEY=VALUE"]),
        (lambda folder: named_variants(["int8"]), ["--variant 'int8'", "int8:weights=int8"]),
        (lambda folder: check_settings("m", {"threds": 1}), ["threds", "did you mean threads"]),
        (lambda folder: _peers("online", ["sglang=x"]), ["sglang", "vllm, llama-server"]),
        (lambda folder: _peers("online", ["vllm=/absent"]), ["vllm=/absent", "no such file"]),
        (lambda folder: _check_writable("--json", folder), ["--json", "is a folder"]),
        (lambda folder: _check_writable("--json", folder / "no" / "r.json"), ["--json", "there is no folder"]),
        (lambda folder: named_variants(["a:weights=int8", "a:weights=float16"]), ["--variant a"]),
        (lambda folder: named_variants(["sojourn:weights=int8"]), ["--variant sojourn"]),
        (lambda folder: read_report(folder / "absent.json"), ["absent.json", "no report"]),
    ],
)
def test_what_cannot_be_measured_is_refused_with_a_sentence(tmp_path, wrong, says):
    with pytest.raises(InputError) as refusal:
        wrong(tmp_path)
    assert all(word in str(refusal.value) for word in says)
