"""The benchmarks themselves: the work is what it is said to be, figures are counted right, records explain them."""

import importlib
import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from bench import client, shapes, tables, worker, workloads
from bench.breakdown import Steps, complaint, explain, steps_of_records, utilisation
from bench.command import _check_writable, _measure, _peers
from bench.results import BenchError, Point, Report, Row, read_report, write_report
from bench.variants import ablations, check_settings, named_variants
from engine import LLM, SamplingParams
from engine.compute import device_ceilings as calibration
from engine.options import assignments
from engine.token.models.registry import load_model
from metrics.compute.roofline import Ceilings, Gemm, ceilings_path, device_name, load_ceilings, store_ceilings
from metrics.errors import CalibrationError, InputError, ModelError
from tests.engine.harness import drain, hand_over, make_engine, submit

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
CEILINGS = Ceilings("a device", 2, "2026-11-21", {}, 2e9, 1e9, 64, [Gemm("float32", 1, 1e9), Gemm("float32", 64, 8e9)])
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 8000, "hidden_size": 32, "intermediate_size": 48,
    "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "rope_theta": 10_000,
}  # fmt: skip
DENSE = {key: value for key, value in MOE.items() if "expert" not in key} | {"architectures": ["Qwen3ForCausalLM"]}


def bare(folder: Path, config: dict) -> Path:
    """A model folder that holds nothing but config.json."""
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def report_of(*points: Point) -> Report:
    return Report("online", "small", "sojourn bench online small", "2026-11-21T00:00:00", {"cpu": "c", "cores": 2}, {},
                  points=list(points), ceilings=CEILINGS)  # fmt: skip


@pytest.mark.parametrize("path", sorted((ROOT / "bench").glob("*.py")), ids=lambda path: path.stem)
def test_every_benchmark_can_be_imported(path):
    """Most of them are run by hand alone."""
    module = importlib.import_module(f"bench.{path.stem}")
    assert module.__doc__ or path.stem == "__init__"


def test_the_nano_vllm_workload_is_the_published_one():
    work = workloads.nano_vllm()
    assert (len(work.prompts), work.input_tokens, work.output_tokens, work.longest) == (256, 142_827, 133_966, 2_011)
    assert len(work.prompts[0]) == 964 and work.prompts[0][:3] == [6311, 6890, 663]
    assert work.output_lens[:5] == [845, 312, 607, 843, 500] and work.temperature == 0.6


def test_the_cpu_workload_has_its_totals_and_bounds():
    work = workloads.cpu_sized()
    assert (len(work.prompts), work.input_tokens, work.output_tokens) == (64, 9_201, 5_101)
    assert all(32 <= len(prompt) <= 256 for prompt in work.prompts) and all(32 <= n <= 128 for n in work.output_lens)


def test_a_reworded_workload_keeps_its_lengths_and_shares_no_prompt():
    work = workloads.cpu_sized()
    other = work.reworded(1)
    assert [*map(len, other.prompts)] == [*map(len, work.prompts)] and other.output_lens == work.output_lens
    assert not {tuple(prompt[:16]) for prompt in work.prompts} & {tuple(prompt[:16]) for prompt in other.prompts}
    assert work.reworded(0) is work


@pytest.mark.parametrize("vocab_size", [100, 2560, 7999])
def test_a_workload_fits_into_a_smaller_vocabulary_and_stays_as_it_is_in_a_larger(vocab_size):
    work = workloads.cpu_sized()
    fitted = work.within(vocab_size)
    assert [*map(len, fitted.prompts)] == [*map(len, work.prompts)] and work.within(8192) is work
    assert max(map(max, fitted.prompts)) < vocab_size


@pytest.mark.parametrize("width", [80, 160])
def test_tables_break_no_figure_on_a_terminal(width):
    figures = {name: [1234.5, 5678.9] for name in tables.FIGURES}
    report = Report("online", "t", "sojourn bench online m", "2026-11-21T00:00:00+00:00", {}, {})
    report.points = [Point(name, "64 at once", figures=figures) for name in ("sojourn", "llama-server q8_0")]
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(tables.render(report, width))
    text = console.export_text()
    assert text.count("(1,234.5–5,678.9)") == 8 and "1.00×" in text and max(map(len, text.splitlines())) <= width


def test_a_benchmark_that_is_cut_short_shows_and_writes_what_it_has(tmp_path, capsys):
    report = Report("kernels", "t", "sojourn bench kernels", "2026-11-21T00:00:00+00:00", {}, {})
    report.rows.append(Row("copy", "1 MiB", 10.0))

    def run(keep):
        keep(report)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _measure(run, tmp_path / "r.json", None)
    assert "1 MiB" in capsys.readouterr().out and "Cut short" in read_report(tmp_path / "r.json").notes[0]


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "mixture"])
def test_random_weights_need_no_more_than_a_config_and_are_the_same_again(tmp_path, config):
    folder = bare(tmp_path, config)
    first, second = (load_model(folder, torch.float32, CPU, 64, dummy=True) for _ in range(2))
    for (name, one), other in zip(first.named_parameters(), second.parameters(), strict=True):
        assert one.isfinite().all() and torch.equal(one, other), name
        assert one.std() > 0.01 if one.dim() > 1 else (one == (0 if "bias" in name else 1)).all(), name
    with pytest.raises(ModelError, match="safetensors"):
        load_model(folder, torch.float32, CPU, 64)


def test_a_bare_config_generates_from_ids_and_refuses_texts(tmp_path):
    records = []
    with LLM(bare(tmp_path, DENSE), load_format="dummy", threads=1, on_steps=records.extend) as llm:
        sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=0)
        outputs = llm.generate([[5, 6, 7], [7999] * 20], sampling)
        with pytest.raises(ModelError, match=r"no tokenizer\.json"):
            llm.generate("a text", sampling)
        answer = worker.run(llm, records, {"prompts": [[9] * 40, [8] * 3], "output_lens": [60, 90], "temperature": 0.6})
    for output in outputs:
        assert len(output.token_ids) == 6 and output.text == "" and output.finish_reason == "length"
        assert all(math.isfinite(told.logprob) for told in output.logprobs)
    assert answer["output_tokens"] == 150 and not answer["errors"]
    steps = Steps({name: np.array(values) for name, values in answer["steps"].items()})
    assert (
        steps.total("tokens") == 43 + 150 - 2
        and complaint(explain(steps, answer["begin_ns"], answer["end_ns"])) is None
    )


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


def test_a_reader_who_has_the_last_token_before_its_step_is_over_is_explained_too(measured):
    steps, begin_ns, end_ns = measured
    third_ns = (end_ns - begin_ns) // steps.count // 3
    told = explain(steps, begin_ns + third_ns, end_ns - third_ns)
    assert complaint(told) is None and told["outside"] == 0
    assert told["wall"] == pytest.approx((end_ns - begin_ns) / 1e6)


@pytest.mark.parametrize("column", ["stage_wait_ns", "device_ns", "gap_ns"])
def test_an_account_that_lacks_time_is_told(measured, column):
    steps, begin_ns, end_ns = measured
    columns = dict(steps.columns)
    columns[column] = columns[column] - 0.05 * (end_ns - begin_ns) / steps.count
    account = "host" if column.startswith("stage") else "device"
    assert f"the {account} accounts" in complaint(explain(Steps(columns), begin_ns, end_ns))


def test_padding_and_overrun_take_their_share_of_the_device(measured):
    steps, begin_ns, end_ns = measured
    columns = dict(steps.columns)
    columns["padding_tokens"], columns["overrun_tokens"] = columns["tokens"], columns["tokens"] / 2
    told = explain(Steps(columns), begin_ns, end_ns)
    device_ms = steps.total("device_ns") / 1e6
    assert told["device padding"] == pytest.approx(device_ms / 2)
    assert told["device overrun"] == told["device work"] == pytest.approx(device_ms / 4)
    assert complaint(told) is None


def test_the_roofline_takes_what_bounds_each_step():
    columns = {"flops": [8e6, 0.0], "bytes": [0.0, 4e6], "device_ns": [3e6, 2e6], "gap_ns": [0.0, 1e6]}
    steps = Steps({name: np.array(values) for name, values in columns.items()})  # 1 ms of arithmetic, 2 ms of memory
    told = utilisation(steps, 6_000_000, CEILINGS, "float32")
    assert msgspec.json.decode(msgspec.json.encode(told)) == told  # as a report writes it
    assert told["roofline_percent"] == pytest.approx(50) and told["mfu_percent"] == pytest.approx(100 / 6)
    assert told["mbu_percent"] == pytest.approx(100 / 3) and told["device_idle_percent"] == pytest.approx(100 / 6)
    assert CEILINGS.ridge("float32") == 4.0 and CEILINGS.roofline_ns(8e6, 0, "float32") == pytest.approx(1e6)
    assert CEILINGS.mfu(4e6, 1e6, "float32") == pytest.approx(0.5) and CEILINGS.mbu(1e6, 1e6) == pytest.approx(0.5)
    with pytest.raises(CalibrationError, match=r"int8.*float32.*calibrate-device"):
        CEILINGS.peak_flops("int8")


def test_ceilings_are_found_where_they_were_stored(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(CalibrationError, match="run sojourn calibrate-device"):
        load_ceilings("a device")
    path = store_ceilings(CEILINGS)
    assert path.is_relative_to(tmp_path) and load_ceilings("a device") == CEILINGS
    path.write_text("{}")
    with pytest.raises(CalibrationError, match="cannot be read"):
        load_ceilings("a device")


def test_calibration_measures_every_precision_and_row_count(monkeypatch):
    small = {"CELL_SECONDS": 0.002, "CPU_INNER": 64, "ROTATED_BYTES": 1 << 16, "STREAM_BYTES": 1 << 20}
    for name, value in small.items():
        monkeypatch.setattr(calibration, name, value)
    threads = torch.get_num_threads()
    ceilings = calibration.calibrate("cpu", threads=1)
    assert torch.get_num_threads() == threads and ceilings.threads == 1
    assert "float32" in ceilings.precisions and ceilings.bandwidth > 0 and ceilings.launch_ns is None
    for precision in ceilings.precisions:
        rates = {gemm.rows: gemm.flops_per_s for gemm in ceilings.gemm if gemm.precision == precision}
        assert tuple(rates) == calibration.CPU_ROWS and all(rate > 0 for rate in rates.values())


def run_bench(tmp_path: Path, *arguments: str) -> Report:
    """`sojourn bench` as a user runs it, on a machine whose ceilings are known."""
    ceilings = msgspec.structs.replace(CEILINGS, device=device_name())
    store_ceilings(ceilings, tmp_path / "sojourn" / ceilings_path(ceilings.device).name)
    command = [sys.executable, "-m", "sojourn", "bench", *arguments, "--json", str(tmp_path / "report.json")]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)}, capture_output=True, text=True,
        timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return read_report(tmp_path / "report.json")


@pytest.mark.slow
def test_offline_runs_each_variant_in_turns_and_its_records_explain_it(tmp_path):
    folder = str(bare(tmp_path, DENSE))
    arguments = ("--variant", "small steps:max_num_batched_tokens=256", "--repeats", "2", "--set", "threads=1")
    report = run_bench(tmp_path, "offline", folder, *arguments)
    assert [point.engine for point in report.points] == ["sojourn", "small steps"] and not report.notes
    for point in report.points:
        assert len(point.figures["output_tokens_per_s"]) == len(point.breakdowns) == 2
        assert all(told["steps"] > 128 for told in point.breakdowns)  # the longest output
    assert report.at("small steps", "cpu").settings["max_num_batched_tokens"] == 256
    assert report.workload["output_tokens"] == 5101 and report.command.startswith("sojourn bench offline")


@pytest.mark.slow
def test_online_measures_a_server_at_every_concurrency(tmp_path):
    folder = bare(tmp_path, DENSE)
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
    assert "`sojourn bench online small`" in text and "2026-11-21" in text and "peer 1.2" in text
    with pytest.raises(BenchError, match="cannot be written"):
        write_report(report, tmp_path / "absent" / "r.json")


def test_tables_are_placed_between_their_marks(tmp_path):
    document = tmp_path / "performance.md"
    document.write_text("# A\n<!-- begin cpu -->\nold\n<!-- end cpu -->\nrest\n")
    tables.place(document, "cpu", "new")
    assert document.read_text() == "# A\n<!-- begin cpu -->\nnew\n<!-- end cpu -->\nrest\n"
    with pytest.raises(BenchError, match="begin gpu"):
        tables.place(document, "gpu", "new")


def test_kernel_rows_are_told_beside_their_limit():
    report = Report("kernels", "k", "c", "2026-11-21", {"cpu": "c", "cores": 2}, {})
    report.rows = msgspec.json.decode(
        msgspec.json.encode([Row("copy", "1 MiB", 10.0, 100.0, "GB/s", 85.0)]), type=list[Row]
    )
    assert "| copy | 1 MiB | 10.0 | 100.0 GB/s | 85 |" in tables.markdown(report)


def test_ablations_are_the_off_switches_of_the_device():
    on_cpu, on_gpu = ablations({"threads": 1}, "cpu"), ablations({"threads": 1}, "NVIDIA H200")
    assert on_cpu["attention_backend=torch"] == {"threads": 1, "attention_backend": "torch"}
    assert "fused_operations=off" in on_cpu and "weights=float32" in on_cpu
    assert "overlap=off" in on_gpu and "overlap=off" not in on_cpu  # it is off there by itself
    assert "graphs=off" in on_gpu and "graphs=off" not in on_cpu and "weights=float32" not in on_gpu
    assert "attention_backend=torch" not in ablations({"attention_backend": "torch"}, "cpu")  # it is off already


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


def test_shapes_and_bare_configs_become_folders_of_random_weights(tmp_path):
    folder, load_format = shapes.model_to_bench("qwen3-14b", tmp_path)
    assert load_format == "dummy" and json.loads((Path(folder) / "config.json").read_text())["hidden_size"] == 5120
    file = bare(tmp_path, DENSE) / "config.json"
    assert shapes.model_to_bench(str(file), tmp_path / "made")[1] == "dummy"
    assert shapes.model_to_bench("tiny-model", tmp_path) == ("tiny-model", "auto")
