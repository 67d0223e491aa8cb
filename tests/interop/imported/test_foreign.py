"""A file that is no result of requests is refused with what it is, and what to give instead."""

import gzip
import json

import pytest

from sojourn.interop.imported.read import read_result
from sojourn.metrics.errors import InputError

SAID = [
    ({"load_summary": {"schedule_delay": {"mean": 3.25}}, "successes": {}}, "inference-perf.*client sent 3.25 s late"),
    ({"request_latency": {"unit": "ms", "avg": 5.0}, "input_config": {}}, "summary of AIPerf.*profile_export.jsonl"),
    ({"experiments": []}, "profile of genai-perf"),
    ([{"hw": "x", "tp": 8, "tput_per_gpu": 9.0}], "row of InferenceX"),
    ({"model_id": "m", "median_ttft_ms": 5.0}, "percentiles, without requests"),
    ({"id": "t", "block_size": 64, "requests": [{"t": 0, "hash_ids": [1]}]}, "trace of kv-cache-tester"),
    ({"timestamp": 0, "input_length": 5, "output_length": 5}, "is a trace: .*arrivals.file"),
    ([{"conversations": []}], "data set of conversations"),
    ({"resourceSpans": []}, "spans of OpenTelemetry"),
    ({"status": "success", "data": {"result": []}}, "answer of Prometheus"),
    ({"backend": "x", "num_prompts": 3, "request_throughput": 2.0, "median_ttft_ms": 7.5, "completed": 3},
     "summaries only.*--save-detailed.*completed 3.*median_ttft_ms 7.5"),
    ({"benchmarks": [{"name": "test_x", "stats": {}}]}, r"known here \(its keys: benchmarks\)"),
    ("name,ttft,tpot\na,1,2\n", "is CSV .*'name'"),
    ("Metric,avg,min\r\n", "is CSV, with a header and no row"),
    ("INFO 03-02 17:42:48 [loggers.py:257] Running: 3 reqs\n", "is a log"),
    ("(pid=3) INFO 03-02 17:42:48 x\n(pid=3) WARNING 03-02 y\n", "is a log"),
    ("2026-01-01 10:00:00,123 began\n2026-01-01 10:00:01,500 ended\n", "is a log"),
    ("benchmarks:\n- config:\n    strategy: {}\n", "is YAML; write the result as JSON"),
    ("<!DOCTYPE html><html></html>", "HTML or XML"),
    ("# HELP vllm:x y\n# TYPE vllm:x gauge\nvllm:x 1\n", "page of /metrics"),
    ('{"benchmarks": [{"requests": {"succ', "is not JSON: .*it was cut off"),
    ('{"metadata": {}, "metrics": {}}\n{"metad', r"line 2 is not JSON.*was the file cut off\?"),
    ("", "is empty"), (" \r\n", "is empty"), (b"\xff\xfe{\x00", "not UTF-8"), (b"PAR1\x00", "is a Parquet file"),
    (gzip.compress(b"{}", mtime=0), "compressed by gzip; unpack it first"), (b"PK\x03\x04..", "zip archive"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "says"), SAID)
def test_foreign_file_is_refused_with_what_it_is_and_the_way_out(tmp_path, content, says):
    file = tmp_path / "file"
    text = content if isinstance(content, str | bytes) else json.dumps(content)
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError, match=says):
        read_result(file)


def test_folder_is_refused_with_the_names_of_the_files_wanted(tmp_path):
    with pytest.raises(InputError, match=r"is a folder; name the result file in it: .*profile_export\.jsonl"):
        read_result(tmp_path)
