"""Result files of other tools as runs. Oracle: the summaries that the tools themselves computed of the same requests.

The files in results/ were measured against our server with the bundled model: vLLM 0.32's bench, GuideLLM 0.8.1 and
AIPerf 0.13. inference-perf's is written here, after the form in its sources.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from sojourn.interop.exported.guidellm_report import guidellm_report
from sojourn.interop.imported import guidellm
from sojourn.interop.imported.read import read_result, write_run
from sojourn.metrics.errors import InputError, RunDataError
from sojourn.metrics.records.tables import SCHEMAS
from sojourn.metrics.request.goodput import judged, measured
from tests.commands.program import run_program
from tests.metrics.synthetic import PLANTS, synthetic_run

RESULTS = Path(__file__).parent / "results"
INFERENCE_PERF = [
    {
        "start_time": 10.5, "end_time": 12.5, "request": "{}", "response": "text", "error": None,
        "info": {"input_tokens": 7, "output_tokens": 3, "output_token_times": [11.0, 11.5, 12.25]},
    },
    {
        "scheduled_time": 10.0, "start_time": 10.25, "end_time": 10.5, "request": "{}", "response": "",
        "error": {"error_type": "ClientError", "error_msg": "refused"},
        "info": {"request_metrics": {"text": {"input_tokens": 9}}, "response_metrics": None},
    },
    {
        "scheduled_time": 11.0, "start_time": 11.0, "end_time": 12.0, "request": "{}", "response": "", "error": None,
        "info": {
            "request_metrics": {"text": {"input_tokens": 9}},
            "response_metrics": {
                "output_tokens": 5, "output_token_times": [11.5, 12.0],
                "server_usage": {
                    "prompt_tokens": 12, "completion_tokens": 6, "prompt_tokens_details": {"cached_tokens": 4},
                },
            },
        },
    },
]  # fmt: skip


def imported(path: Path, tmp_path: Path):
    (found,) = read_result(path)
    return write_run(found, tmp_path / "run", path.name)


def test_vllm_bench_file_has_the_latencies_that_vllm_computed(tmp_path):
    run = imported(RESULTS / "vllm.json", tmp_path)
    told, rows = json.loads((RESULTS / "vllm.json").read_text()), run.requests()
    assert len(rows) == told["completed"] == 12 and (rows.status == "ok").all()
    from_send = (rows.first_token_ns - rows.sent_ns).astype(float) / 1e6
    assert from_send.mean() == pytest.approx(told["mean_ttft_ms"], abs=1e-3)
    assert np.percentile(from_send, 99) == pytest.approx(told["p99_ttft_ms"], abs=1e-3)
    assert rows.tpot_ms.mean() == pytest.approx(told["mean_tpot_ms"], rel=0.05)  # vLLM divides up to the last byte
    assert rows.prompt_tokens.sum() == told["total_input_tokens"]
    assert rows.output_tokens.sum() == told["total_output_tokens"]


def test_aiperf_file_has_the_latencies_that_aiperf_computed(tmp_path):
    rows = imported(RESULTS / "profile_export.jsonl", tmp_path).requests().set_index("request_id")
    entries = [json.loads(line) for line in (RESULTS / "profile_export.jsonl").read_text().splitlines()]
    assert len(rows) == len(entries) == 6
    for entry in entries:
        row = rows.loc[entry["metadata"]["x_request_id"]]
        metrics = {name: metric["value"] for name, metric in entry["metrics"].items()}
        assert (row.first_token_ns - row.sent_ns) / 1e6 == pytest.approx(metrics["time_to_first_token"], abs=2e-3)
        assert (row.last_byte_ns - row.sent_ns) / 1e6 == pytest.approx(metrics["request_latency"], rel=1e-3)
        assert row.tpot_ms == pytest.approx(metrics["inter_token_latency"], rel=1e-3)
        assert row.prompt_tokens == metrics["usage_prompt_tokens"] and row.due_ns <= row.sent_ns


def test_guidellm_file_has_the_latencies_that_guidellm_computed(tmp_path):
    run = imported(RESULTS / "guidellm.json", tmp_path)
    rows = run.requests().set_index("request_id")
    entries = json.loads((RESULTS / "guidellm.json").read_text())["benchmarks"][0]["requests"]["successful"]
    for entry in entries:
        row = rows.loc[entry["request_id"]]
        assert (row.first_token_ns - row.sent_ns) / 1e6 == pytest.approx(entry["time_to_first_token_ms"], abs=1e-3)
        assert row.tpot_ms == pytest.approx(entry["inter_token_latency_ms"], abs=1e-3)
        assert row.e2e_ms == pytest.approx(entry["request_latency"] * 1e3, abs=1e-3)  # a closed loop: due when sent
    assert rows.chunk_ns.map(len).sum() == 0  # the file has no time of each token, so none is made up
    assert run.meta()["scenario"]["arrivals"] == {"process": "concurrency", "in_flight": 2}


def test_inference_perf_file(tmp_path):
    file = tmp_path / "per_request_lifecycle_metrics.json"
    file.write_text(json.dumps(INFERENCE_PERF))
    rows = imported(file, tmp_path).requests().set_index("request_id")
    refused, first, third = (rows.loc[f"inference-perf-{number:06d}"] for number in (1, 0, 2))
    assert (refused.status, refused.error, refused.sent_ns - refused.due_ns) == ("error", "refused", 250_000_000)
    assert (first.ttft_ms, first.e2e_ms, first.tpot_ms) == (500.0, 2000.0, 625.0)
    assert (first.prompt_tokens, first.output_tokens) == (7, 3)
    assert (third.prompt_tokens, third.output_tokens, third.cached_tokens) == (12, 6, 4)


@pytest.mark.parametrize(
    ("form", "tolerance_ms"), [("vllm", 1e-3), ("aiperf", 1e-3), ("inference-perf", 1e-3), ("guidellm", 1e-3)]
)
def test_export_and_import_give_the_same_run(tmp_path, form, tolerance_ms):
    """Round trip: a run of ours, with failures, written as another tool's file and read back."""
    run = synthetic_run(tmp_path / "ours", requests=40, plant=replace(PLANTS["small_batch_cap"], failing_share=0.2))
    ours = measured(run.requests(), run.meta()).sort_values("due_ns", ignore_index=True)
    file = tmp_path / "file"
    done = run_program("export", str(run.path), "--to", form, "--output", str(file))
    assert done.returncode == 0, done.stderr
    back = imported(file, tmp_path).requests()
    assert 0 < (ours.status == "ok").sum() < len(ours) == len(back)
    assert back.status.eq("ok").tolist() == ours.status.eq("ok").tolist()
    for name in ("ttft_ms", "e2e_ms", "tpot_ms"):
        assert np.allclose(back[name], ours[name], atol=1e-3, equal_nan=True), name
    served = ours.status == "ok"
    for name in ("prompt_tokens", "output_tokens"):
        assert back[name][served].tolist() == ours[name][served].tolist()


def test_guidellm_report_has_the_objectives_only_where_all_classes_share_them(tmp_path):
    run = synthetic_run(tmp_path / "ours", requests=40)
    frame, meta = measured(run.requests(), run.meta()), run.meta()
    objectives = [{"klass": "all", "ttft_ms": 300.0, "tpot_ms": 40.0}]
    meta["objectives"] = objectives
    document = guidellm_report(frame, meta, "ours")
    (back,) = guidellm.read(document)
    assert back.objectives == [{"klass": "all", "source": "the result file", "ttft_ms": 300.0, "tpot_ms": 40.0}]
    metrics = document["benchmarks"][0]["metrics"]
    ours = judged(frame.assign(due_ns=frame.sent_ns), objectives)  # as GuideLLM, from the actual send
    assert metrics["slo_attainment"] == pytest.approx(ours.good.mean())
    meta["objectives"] = [*objectives, {"klass": str(frame.klass.iloc[0]), "ttft_ms": 1.0}]
    frame = pd.concat([frame, frame.assign(klass="another", request_id=frame.request_id + "b")])
    assert guidellm.read(guidellm_report(frame, meta, "ours"))[0].objectives == []


def test_run_says_what_the_file_lacks_and_its_diagnosis_abstains(tmp_path):
    done = run_program("import", str(RESULTS / "guidellm.json"), "--output", str(tmp_path / "run"), "--slo", "ttft:300")
    assert done.returncode == 0, done.stderr
    assert "not in the file: the time of each token" in " ".join(done.stdout.split())
    document = json.loads((tmp_path / "run" / "diagnosis.json").read_text())
    assert any("not in the imported file" in sentence for sentence in document["warnings"])
    assert document["closure"]["joined"] == 0 and document["ledger_share"]["compute.decode"] == 0  # no server was seen
    assert document["results"]["deadlines"] == []  # they need the time of each token
    meta = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (meta["valid"], meta["client_error"], meta["seed"], meta["imported"]["version"]) == (
        None,
        None,
        None,
        "0.8.1",
    )
    assert run_program("import", str(RESULTS / "guidellm.json"), "--output", str(tmp_path / "run")).returncode == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"{", "is not JSON"),
        (b"[]", "no result file that is known"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b'{"a": 1}', "no result file that is known"),
        (b'{"backend": "vllm", "num_prompts": 1, "request_throughput": 2.0}', "--save-detailed"),
        (b'{"metadata": {}, "benchmarks": []}', "no benchmark"),
        (b'{"metadata": {}, "benchmarks": [{"requests": {}}]}', "lists no request"),
        (b'[{"start_time": "x", "end_time": 1, "info": {}}]', "without start_time"),
        (b'{"metadata": {"request_start_ns": 1, "benchmark_phase": "warmup"}, "metrics": {}}', "of the warm-up"),
    ],
)
def test_what_cannot_be_read_is_refused_with_a_sentence(tmp_path, content, says):
    file = tmp_path / "file.json"
    file.write_bytes(content)
    with pytest.raises(InputError, match=says):
        read_result(file)
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("name", ["vllm.json", "guidellm.json", "profile_export.jsonl"])
def test_damaged_values_are_refused_or_stay_within_the_schema(tmp_path, name):
    """Values of a file, one after the other, become ones of another kind: a sentence, or a run that can be read."""
    lines = (RESULTS / name).read_text().splitlines()
    document = json.loads(lines[0])
    if name == "guidellm.json":
        document["benchmarks"][0]["requests"]["successful"] = document["benchmarks"][0]["requests"]["successful"][:1]
    places = list(paths(document))
    random = np.random.default_rng(0)
    for number, index in enumerate(random.choice(len(places), size=min(150, len(places)), replace=False)):
        changed = json.loads(json.dumps(document))
        put(changed, places[index], ["x", None, -1, [], {}, 1e400][number % 6])
        file = tmp_path / "damaged.json"
        file.write_text(json.dumps(changed))
        try:
            found = read_result(file)
            run = write_run(found[0], tmp_path / f"run-{number}", name)
        except (InputError, RunDataError):
            continue
        assert run.table("client").columns.tolist() == SCHEMAS["client"].names


def paths(value, place=()):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*place, key)
        yield from paths(inner, (*place, key))


def put(document, place, value):
    for key in place[:-1]:
        document = document[key]
    document[place[-1]] = value
