"""`sojourn size` answers without a GPU, weights or the extra, and refuses with what is known."""

import json
from types import SimpleNamespace

import msgspec
import pytest

from sojourn.commands.size import _load as load_named
from sojourn.commands.size_calibrate import _load, correction_of
from sojourn.loadgen.traces.reader import TRACE_FOLDER
from sojourn.metrics.compute.model_catalog import find_model
from sojourn.metrics.compute.rank_shape import rank_shape
from sojourn.metrics.errors import SojournError
from sojourn.metrics.request.goodput import measured
from sojourn.replay.device.estimate import Deployment
from sojourn.replay.sizing.answer import Question, _settings
from sojourn.replay.sizing.load import plain_load
from tests.commands.program import run_program
from tests.metrics.synthetic import synthetic_run
from tests.replay.device.simulated_device import FormulaDevice

SLO = ("--slo", "ttft:1000 tpot:50")
# Few requests at a time make trials short.
QUICK = ("Llama-3.1-8B", "512/32", "--device", "h100_sxm", "--times", "roofline", "--set", "max_num_seqs=8", *SLO)


@pytest.fixture(autouse=True)
def short_trials(monkeypatch):
    monkeypatch.setattr("sojourn.replay.sizing.limit.FEWEST", 80)
    monkeypatch.setattr("sojourn.replay.sizing.fleet.FEWEST_REQUESTS", 100)


def sized(*words: str, **more) -> dict:
    done = run_program("size", *words, "--json", **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_a_scenario_is_sized_with_every_part_of_the_answer():
    done = run_program("size", "Llama-3.1-8B", "steady-chat", *QUICK[2:], "--rate", "300")
    assert done.returncode == 0
    for part in ("memory", "32 layers × 2 × 8 KV heads × 128 × 2 bytes", "peak rates",
                 "largest load within the objective", "walls", "← nearest", "price", "split", "fleet"):  # fmt: skip
        assert part in done.stdout, part
    assert all(len(line) <= 80 for line in done.stdout.splitlines())


def test_two_devices_serve_more_and_the_table_names_both():
    document = sized(*QUICK, "--tp", "1,2")
    one, two = document["answers"]
    assert two["largest"]["rate_rps"] > 1.2 * one["largest"]["rate_rps"]
    assert one["memory"]["kv_bytes_per_token"] == 2 * two["memory"]["kv_bytes_per_token"] == 131_072
    assert one["usd_per_hour"] * 2 == two["usd_per_hour"] and one["binding"]
    assert one["largest"]["attainment"] >= 0.9
    unmeasured = [any("no measurement there is of 1 × h100_sxm" in doubt for doubt in each["doubts"])
                  for each in (one, two)]  # fmt: skip
    assert unmeasured == [True, False] and one["known_error"]["cell"].endswith("bf16, 2, 4 or 8 devices")


def test_a_trace_is_a_file_of_any_form_or_a_bundled_name(tmp_path):
    """By its path and by its name it is one load."""
    bundled = TRACE_FOLDER / "AzureLLMInferenceTrace_code.csv"
    own = tmp_path / "own.jsonl"
    own.write_text("".join(json.dumps({"timestamp": 500 * each, "input_length": 600, "output_length": 8, "hash_ids": [
        1, each]}) + "\n" for each in range(40)))  # fmt: skip
    loads = [load_named(text, "ttft:1000", None) for text in (bundled.name, f"{bundled}", f"{own}")]
    assert [is_trace for _, _, is_trace in loads] == [True] * 3
    assert loads[0][0].mean_prompt == loads[1][0].mean_prompt and loads[2][0].mean_prompt == 600
    assert sized("Llama-3.1-8B", f"{own}", *QUICK[2:])["answers"][0]["fleet"]["rate_rps"] == pytest.approx(2, rel=0.1)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(SojournError, match=r"empty\.jsonl"):
        load_named(f"{tmp_path}/empty.jsonl", "ttft:1000", None)


def test_a_load_of_few_requests_shows_no_limit_and_no_interval(tmp_path):
    """A server that a few requests cannot fill: the figure is a lower bound, and says so."""
    rows = [{"timestamp": 100 * each, "input_length": 600, "output_length": 200} for each in range(20)]
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(row | {"hash_ids": [1]}) + "\n" for row in rows))
    answer = sized("Llama-3.1-8B", f"{tmp_path}/few.jsonl", "--device", "h100_sxm", "--times", "roofline", *SLO)[
        "answers"
    ][0]
    most = answer["largest"]
    assert 1 < most["in_flight"] <= 20 / 2 and most["answers_long"] >= 2, "as many as the requests can be at a time"
    assert answer["low"] is answer["high"] is None
    assert any("too few requests" in each and "lies above" in each for each in answer["doubts"])


def test_a_largest_load_outside_of_its_own_interval_is_said():
    """Peak rates are known to be too short, so that the interval ends below the figure."""
    answer = sized(*QUICK)["answers"][0]
    assert answer["high"] < answer["largest"]["rate_rps"]
    assert any(f"plan with {answer['high']:,.4g}" in each for each in answer["doubts"])


def test_a_price_a_setting_and_a_closed_loop_change_the_answer():
    capped = sized(*QUICK, "--usd-per-hour", "1")["answers"][0]
    assert capped["largest"]["most_running"] <= 8 and capped["usd_per_hour"] == 1
    closed = sized("Llama-3.1-8B", "agents", *QUICK[2:6], "--set", "max_num_seqs=2", "--slo", "e2e:300")["answers"][0]
    assert 1 <= closed["largest"]["slots"] < 150 and closed["largest"]["rate_rps"] is None


def test_another_block_size_leaves_the_memory_as_it_is():
    config = _settings(FormulaDevice(), plain_load(8, 8, 10), Question(objectives=[], settings={"block_size": 64}))
    assert config["num_kv_blocks"] == 1_000_000 // 64


def test_a_measured_point_corrects_the_estimate(tmp_path):
    """A summary of a server twice as slow as the estimate says."""
    point = {"request_rate": 2.0, "max_concurrency": None, "completed": 200, "total_input_tokens": 102_400,
             "total_output_tokens": 6_400, "duration": 100.0, "request_throughput": 2.0, "output_throughput": 64.0,
             "mean_ttft_ms": 30.0, "median_ttft_ms": 30.0, "p99_ttft_ms": 40.0, "mean_tpot_ms": 12.0,
             "median_tpot_ms": 12.0, "p99_tpot_ms": 14.0, "backend": "vllm", "num_prompts": 200}  # fmt: skip
    (tmp_path / "result.json").write_text(json.dumps(point))
    plain = sized(*QUICK)["answers"][0]
    found = sized(*QUICK, "--calibrate", str(tmp_path / "result.json"))["answers"][0]
    correction = found["correction"]
    assert 1.5 < correction["decode"] < 4 and "TPOT 12 ms" in correction["sentence"]
    assert found["largest"]["rate_rps"] < plain["largest"]["rate_rps"]
    known, before = found["known_error"], plain["known_error"]
    assert "corrected by one measured point" in known["cell"] and known["p90"] < before["p90"]
    assert found["low"] < found["largest"]["rate_rps"] and found["low"] < found["high"]
    assert known["high"] / known["low"] < before["high"] / before["low"]


@pytest.mark.parametrize(("stated", "sentence"), [
    ({"model_id": "meta-llama/Llama-3.1-70B-Instruct"}, "another model, Llama-3.1-70B, and corrects no times of"),
    ({"hw": "h200"}, "another device, h200_sxm,"), ({"hw": "h100"}, ""), ({"hw": "somewhere"}, ""),
    ({"tp": 8}, "another tensor parallel degree, 8,"), ({"hw": "H100 PCIe"}, "another device, h100_pcie,"),
    ({"model_id": "meta-llama/Llama-3.1-8B-Instruct", "tp": 1, "hw": "NVIDIA H100 80GB HBM3"}, ""), ({}, ""),
])  # fmt: skip
def test_a_point_of_another_server_corrects_nothing(tmp_path, stated, sentence):
    point = {"request_rate": 2.0, "completed": 200, "total_input_tokens": 102_400, "total_output_tokens": 6_400,
             "duration": 100.0, "request_throughput": 2.0, "output_throughput": 64.0, "mean_ttft_ms": 30.0,
             "mean_tpot_ms": 12.0, "median_tpot_ms": 12.0, "backend": "vllm", "num_prompts": 200}  # fmt: skip
    (tmp_path / "result.json").write_text(json.dumps(point | stated))
    estimate, load = FormulaDevice(), plain_load(512, 32, 200)
    estimate.deployment = Deployment(model="Llama-3.1-8B", device="h100_sxm")
    if not sentence:
        assert correction_of(f"{tmp_path}/result.json", estimate, load, {}).decode > 0
        return
    if "device" in sentence:  # of the user's own name any device may be the one that was measured
        own = FormulaDevice()
        own.deployment = Deployment(model="Llama-3.1-8B", device="my_card")
        assert correction_of(f"{tmp_path}/result.json", own, load, {}).decode > 0
    with pytest.raises(SojournError, match=sentence):
        correction_of(f"{tmp_path}/result.json", estimate, load, {})


def test_a_run_of_another_model_corrects_nothing(tmp_path):
    run, estimate = synthetic_run(tmp_path / "run"), FormulaDevice()
    run.update_meta(model_shape=msgspec.to_builtins(rank_shape(find_model("tiny-model"))))
    estimate.deployment = Deployment(model="Llama-3.1-8B", device="h100_sxm")
    with pytest.raises(SojournError, match="another model"):
        correction_of(f"{run.path}", estimate, plain_load(512, 32, 200), {})


def test_a_run_on_its_own_steps_is_what_it_was(tmp_path):
    """The load of a run, sized with the steps of the same run, gives the run's own time per output token."""
    run = synthetic_run(tmp_path / "run")
    answer = sized("tiny-model", str(run.path), "--device", str(run.path))["answers"][0]
    assert answer["provenance"] == "steps of run" and answer["largest"]["rate_rps"] > 0
    recorded = measured(run.requests(), run.meta()).tpot_ms.astype(float)
    assert answer["own_rate"]["tpot_ms"]["p50"] == pytest.approx(recorded.median(), rel=0.1)
    assert answer["own_rate"]["tpot_ms"]["p90"] == pytest.approx(recorded.quantile(0.9), rel=0.1)


@pytest.mark.parametrize(("model", "words", "sentence"), [
    ("Llama-3.1-8B", (), "another model"), ("tiny-model", ("--tp", "2"), "give --tp 1"),
    ("tiny-model", ("--weights", "fp8"), "leave --weights"), ("tiny-model", ("--backend", "sglang"), "leave --weights"),
])  # fmt: skip
def test_steps_of_a_run_say_nothing_of_another_server(tmp_path, model, words, sentence):
    run = synthetic_run(tmp_path / "run")
    meta = run.meta() | {"model_shape": msgspec.to_builtins(rank_shape(find_model("tiny-model")))}
    (run.path / "run.json").write_bytes(msgspec.json.encode(meta))
    done = run_program("size", model, str(run.path), "--device", str(run.path), *words)
    assert done.returncode in (1, 2) and sentence in " ".join((done.stdout + done.stderr).split())


def test_a_rate_that_a_cap_held_back_is_no_load():
    def load(served: float, **stated: float):
        values = {("requests_per_s", "rate"): served}
        found = SimpleNamespace(load=stated, value=lambda name, statistic: values.get((name, statistic)))
        return _load(found)

    assert load(4.9, request_rate=5.0, max_concurrency=64) == (5.0, None)
    assert load(2.0, request_rate=5.0, max_concurrency=8) == (None, 8.0)
    assert load(2.0, request_rate=5.0) == (5.0, None)


@pytest.mark.parametrize(("words", "sentence"), [
    (("Llama-9", "512/64", "--device", "h100_sxm", *SLO), "no bundled shape"),
    (("Llama-3.1-8B", "512/64", "--device", "h100", *SLO), "Known are a100_sxm"),
    (("Llama-3.1-8B", "512/64", "--device", "h100_sxm", "--tp", "3", *SLO), "it can be 1, 2, 4"),
    (("Llama-3.1-8B", "512/64", "--device", "h100_sxm", "--weights", "int3", *SLO), "known are fp32"),
    (("Llama-3.1-8B", "512/64", "--device", "h100_sxm", "--kv", "int4", *SLO), "known are bf16"),
    (("Llama-3.1-8B", "512/64", "--device", "h100_sxm", "--backend", "tgi", *SLO), "one of vllm"),
    (("Llama-3.1-8B", "512/64", "--device", "h100_sxm"), "--slo"),
    *((("Llama-3.1-8B", text, "--device", "h100_sxm", *SLO), "whole tokens from 1 to 999,999,999, such as 1024/256")
      for text in ("no-such", "1024/-5", "1024/", "/256", "1e3/5", "1024x256", "\u0663/\u0664", f"{10**20}/5")),
    (("Llama-3.1-8B", "1024/0", "--device", "h100_sxm", *SLO), "at least one token"),
    (("Llama-3.1-8B", "200000/64", "--device", "h100_sxm", *SLO), "a context of 131,072 tokens"),
    (("Llama-3.1-70B", "512/64", "--device", "h100_sxm", *SLO), "leaves no memory"),
    (("Llama-3.1-8B", "512/64", "--device", "h100_sxm", "--set", "kv_scale=2", *SLO), "settings of a server"),
    (("Llama-3.1-8B", "512/64", "--device", "h100_sxm", "--set", "max_num_seqs=0", *SLO), "max_num_seqs=0"),
    (("Llama-3.1-8B", "512/64", "--device", "h100_sxm", "--set", "block_size=x", *SLO), "block_size='x'"),
    (("Llama-3.1-8B", "512/64", "--device", "h100_sxm", "--set", "nope=1", *SLO), "not a setting"),
    (("Llama-3.1-8B", "512/64", "--device", "h100_sxm", "--set", "tensor_parallel=2", *SLO), "changes nothing"),
    (("Llama-3.1-8B", "512/64", "--device", "h100_sxm", "--calibrate", "no.json", *SLO), "no.json"),
])  # fmt: skip
def test_what_cannot_be_sized_is_refused_with_what_is_known(words, sentence):
    done = run_program("size", *words)
    assert done.returncode in (1, 2)
    assert sentence in " ".join((done.stdout + done.stderr).split())
