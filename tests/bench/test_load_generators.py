"""What the benchmark of load generators reads out of their result files, and how it compares that with the truth."""

import json

import numpy as np
import pytest

from bench.load_generators.accuracy import ClientFailed, Seen, accuracy, aiperf_seen, guidellm_seen, vllm_seen
from sojourn.loadgen.reference_server.instructions import ServedRequest

MS = 1_000_000


def test_vllm_stamps_are_start_plus_ttft_plus_gaps_and_failed_requests_have_none():
    result = {"start_times": [10.0, 11.0], "ttfts": [0.5, 0.0], "itls": [[0.25, 0.125], []]}
    stamps_ns = {0: 10_500_000_000, 1: 10_750_000_000, 2: 10_875_000_000}
    assert vllm_seen(result) == [Seen("vllm-0", stamps_ns)]


def test_guidellm_stamps_are_taken_from_the_wall_clock_to_ours():
    timings = {"first_token_iteration": 1000.5, "last_token_iteration": 1002.0}
    report = {"benchmarks": [{"requests": {"successful": [{"response_id": "a", "info": {"timings": timings}}]}}]}
    assert guidellm_seen(report, 900 * 1000 * MS) == [Seen("a", {0: 100_500 * MS, -1: 102_000 * MS})]


def test_aiperf_stamps_are_those_of_tokens_not_of_usage_or_the_end():
    def read(ns, *values):
        return {"perf_ns": ns, "packets": [{"name": "data", "value": value} for value in values]}

    token, usage = json.dumps({"choices": [{"text": " the"}]}), json.dumps({"choices": [], "usage": {}})
    responses = [read(5, token), read(7, token, usage, "[DONE]")]
    line = json.dumps({"metadata": {"x_request_id": "a"}, "responses": responses})
    assert aiperf_seen([line]) == [Seen("a", {0: 5, 1: 7})]


def test_only_writes_while_all_streams_were_open_are_compared():
    answers, seen = [], []
    for index in range(1000):
        read_ns = index * 10 * MS
        written = [read_ns + 100 * MS + token * 20 * MS for token in range(150)]
        answers.append(ServedRequest(f"r{index}", read_ns, 7, "ok", written, written, [1] * 150))
        error_ns = np.where((np.array(written) >= 3100 * MS) & (np.array(written) < 9990 * MS), 2 * MS, 50 * MS)
        seen.append(Seen(f"r{index}", dict(enumerate((np.array(written) + error_ns).tolist()))))
    found = accuracy("planted", [*seen, Seen("unknown", {0: 1})], answers, 1.0, 2.0)
    assert (found.requests, found.p50_ms, found.p99_ms, found.max_ms) == (1000, 2.0, 2.0, 2.0)
    assert found.itl_p99_ms == 0.0 and found.streams == pytest.approx(300, rel=0.01)
    ends = accuracy("two stamps", [Seen(each.request_id, {0: each.stamps_ns[0], -1: each.stamps_ns[149]})
                                   for each in seen], answers, 1.0, 2.0)  # fmt: skip
    assert ends.p99_ms == 2.0 and ends.itl_p99_ms is None
    with pytest.raises(ClientFailed, match="told 1 requests, 0 of them known"):
        accuracy("other", [Seen("unknown", {0: 1})], answers, 1.0, 2.0)
