"""Our client's stamps are nearer to the truth than those of other load generators, at 256 streams of 50 tokens/s.

Each runs beside the same reference server on the same two cores, and is skipped where it is not installed:

    PATH="$PATH:.../guidellm/bin:.../aiperf/bin" SOJOURN_VLLM_PYTHON=.../vllm/bin/python \\
        pytest -m peer tests/peers/test_client_accuracy.py
"""

import os
import shutil

import pytest

from bench.load_generators.accuracy import Accuracy, Load, contenders, measure

LOAD = Load(streams=256, tokens_per_s=50.0, seconds=6.0, in_step=True)

pytestmark = [pytest.mark.peer, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def two_cores():
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:2])
    yield
    os.sched_setaffinity(0, before)


@pytest.fixture(scope="module")
def ours(two_cores) -> Accuracy:
    return measure("sojourn", contenders(None, None, None)["sojourn"], LOAD)


@pytest.mark.parametrize("name", ["guidellm", "aiperf", "vllm bench serve"])
def test_our_p99_timestamp_error_is_lower(name, ours):
    found = contenders(shutil.which("guidellm"), shutil.which("aiperf"), os.environ.get("SOJOURN_VLLM_PYTHON"))
    if name not in found:
        pytest.skip(f"{name} is not installed where this test looks for it")
    theirs = measure(name, found[name], LOAD)
    assert ours.stamps > 10_000 and theirs.stamps > 500
    assert ours.p99_ms < theirs.p99_ms and ours.ttft_p99_ms < theirs.ttft_p99_ms
