"""Requests of a vLLM result against its own summary."""

import math
from typing import Any

import pytest

from sojourn.interop.imported.vllm import read
from sojourn.metrics.errors import InputError

N = 30


def _file(**changed: Any) -> dict[str, Any]:
    return {
        "backend": "vllm", "request_throughput": 8.8, "duration": 3.4, "completed": N, "failed": 0,
        "total_output_tokens": 5 * N, "mean_ttft_ms": 50, "input_lens": [10] * N, "output_lens": [5] * N,
        "ttfts": [0.05] * N, "itls": [[0.01] * 4] * N, "start_times": [i * 0.1 for i in range(N)],
        "errors": [""] * N, **changed,
    }  # fmt: skip


def test_a_file_that_agrees_with_itself_has_no_note() -> None:
    assert read(_file())[0].notes == []


@pytest.mark.parametrize(("changed", "says"), [
    ({"ttfts": [50] * N, "itls": [[10] * 4] * N}, "milliseconds"),
    ({"start_times": [0.0] * N}, "duration"),
    *(({"ttfts": [bad] * N}, "no time") for bad in (math.nan, math.inf, -0.01, "x", None)),
])  # fmt: skip
def test_times_that_cannot_be_true_are_refused(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        read(_file(**changed))


def test_totals_that_differ_are_noted() -> None:
    assert len(read(_file(completed=7, total_output_tokens=99999))[0].notes) == 2
