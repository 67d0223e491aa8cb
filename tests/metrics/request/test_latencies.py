"""Latencies mean what their definitions say, from both origins and for any number of tokens in a chunk."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sojourn.metrics.request.latencies import (
    DEFINITIONS,
    QUANTILE_MIN_SAMPLES,
    gaps_ms,
    inter_chunk_ms,
    itl_ms,
    summaries,
    with_origins,
)

MS = 1_000_000
few = settings(max_examples=100)
streams = st.lists(st.tuples(st.integers(0, 50 * MS), st.integers(0, 5)), min_size=1, max_size=30)


def served(due_ms: float, sent_ms: float, stamps_ms: list[float], tokens: list[int] | None = None) -> dict:
    """One request as `RunDirectory.requests()` has it."""
    counts = tokens or [1] * len(stamps_ms)
    later = sum(counts[1:])
    return {
        "status": "ok", "klass": "chat", "due_ns": int(due_ms * MS), "sent_ns": int(sent_ms * MS),
        "last_byte_ns": int(stamps_ms[-1] * MS), "output_tokens": sum(counts), "prompt_tokens": 10,
        "chunk_ns": [int(stamp * MS) for stamp in stamps_ms], "chunk_tokens": counts,
        "ttft_ms": stamps_ms[0] - due_ms, "e2e_ms": stamps_ms[-1] - due_ms,
        "tpot_ms": (stamps_ms[-1] - stamps_ms[0]) / later if later else math.nan,
    }  # fmt: skip


def failed(due_ms: float, status: str = "error") -> dict:
    return {
        "status": status, "klass": "chat", "due_ns": int(due_ms * MS), "sent_ns": int(due_ms * MS),
        "last_byte_ns": None, "output_tokens": None, "prompt_tokens": None, "chunk_ns": [], "chunk_tokens": [],
        "ttft_ms": math.nan, "e2e_ms": math.nan, "tpot_ms": math.nan,
    }  # fmt: skip


@few
@given(streams)
def test_gaps_sum_to_the_last_stamp_minus_the_first_whatever_came_in_a_chunk(stream):
    stamps = np.cumsum([gap for gap, _ in stream])
    tokens = [count for _, count in stream]
    span_ms = (stamps[-1] - stamps[0]) / MS
    assert inter_chunk_ms(stamps).sum() == pytest.approx(span_ms)
    told = itl_ms(stamps, tokens)
    distinct = np.unique(stamps)
    later = sum(count for stamp, count in zip(stamps, tokens, strict=True) if stamp > distinct[0])
    assert len(told) == later
    assert told.sum() == pytest.approx(span_ms if later else 0.0)


def test_chunk_of_four_tokens_is_one_gap_between_chunks_and_four_between_tokens():
    stamps, tokens = [10 * MS, 50 * MS, 60 * MS], [1, 4, 1]
    assert inter_chunk_ms(stamps).tolist() == [40, 10]
    assert itl_ms(stamps, tokens).tolist() == [10, 10, 10, 10, 10]
    assert inter_chunk_ms([5 * MS, 5 * MS, 25 * MS]).tolist() == [0, 20]  # two chunks in one read
    assert itl_ms([5 * MS, 5 * MS, 25 * MS], [1, 1, 2]).tolist() == [10, 10]
    assert itl_ms(stamps, []).tolist() == [40, 10]  # nobody told: a chunk stands for a token


def test_delay_of_the_generator_is_in_what_runs_from_the_intended_send_only():
    prompt, late = served(0, 0, [100, 120, 140]), served(0, 70, [170, 190, 210])
    rows = with_origins(pd.DataFrame([prompt, late]))
    assert rows.ttft_ms.tolist() == [100, 170] and rows.ttft_sent_ms.tolist() == [100, 100]
    assert rows.e2e_ms.tolist() == [140, 210] and rows.e2e_sent_ms.tolist() == [140, 140]
    assert rows.normalised_ms.tolist() == [pytest.approx(140 / 3), 70]
    assert rows.normalised_sent_ms.tolist() == [pytest.approx(140 / 3)] * 2


def test_failed_requests_move_quantiles_up_and_out_of_reach():
    good = [served(10 * n, 10 * n, [10 * n + 5 + n, 10 * n + 50 + n]) for n in range(90)]
    whole = {row.name: row for row in summaries(pd.DataFrame(good))}["ttft_ms"]
    mixed = {row.name: row for row in summaries(pd.DataFrame(good + [failed(5000 + n) for n in range(20)]))}["ttft_ms"]
    assert mixed.failed == 20 and mixed.samples == 90 and mixed.mean == whole.mean
    assert mixed.quantiles["p50"].value > whole.quantiles["p50"].value
    assert mixed.quantiles["p90"].value is None and whole.quantiles["p90"].value is not None
    assert whole.quantiles["p99"].value is None  # it takes 662


@pytest.mark.parametrize("requests", [4, 70, 700])
def test_gaps_claim_no_more_quantiles_than_their_requests_can(requests):
    rows = [served(10 * n, 10 * n, np.cumsum(np.full(700 // requests + 2, 5.0)).tolist()) for n in range(requests)]
    for row in summaries(pd.DataFrame(rows)):
        told = [name for name, estimate in row.quantiles.items() if estimate.value is not None]
        assert told == [name for name, fewest in QUANTILE_MIN_SAMPLES.items() if requests >= fewest], row.name


def test_every_figure_has_a_definition_and_lies_in_its_interval():
    random = np.random.default_rng(0)
    rows = []
    for n in range(200):
        stamps = 20.0 * n + 30 + np.cumsum(random.exponential(20, 20))
        rows.append(served(20.0 * n, 20.0 * n + random.exponential(1), stamps.tolist()))
    for row in summaries(pd.DataFrame(rows)):
        assert row.name in DEFINITIONS and DEFINITIONS[row.name].meaning
        for estimate in (row.mean, row.quantiles["p50"], row.quantiles["p90"]):
            assert estimate.interval.low is None or estimate.interval.low <= estimate.value
            assert estimate.interval.high is None or estimate.value <= estimate.interval.high


def test_run_without_a_request_has_no_latency():
    assert summaries(pd.DataFrame([failed(0)])[:0]) == [] and summaries(pd.DataFrame([failed(0)])) == []


def test_gaps_of_many_requests_are_those_of_each():
    """Metamorphic: all requests at once, and one by one."""
    random = np.random.default_rng(0)
    for _ in range(300):
        streams = [np.sort(random.integers(0, 8, random.integers(0, 7))) for _ in range(random.integers(1, 5))]
        told = [random.integers(0, 3, len(each)) if random.random() < 0.8 else [] for each in streams]
        frame = pd.DataFrame({"status": "ok", "chunk_ns": pd.Series(streams), "chunk_tokens": pd.Series(told)})
        for name, own in (("itl_ms", itl_ms), ("inter_chunk_ms", lambda stamps, _: inter_chunk_ms(stamps))):
            each = [own(stamps, tokens) for stamps, tokens in zip(streams, told, strict=True)]
            gaps, owners = gaps_ms(name, frame)
            assert gaps.tolist() == pytest.approx(np.concatenate(each).tolist())
            assert owners.tolist() == np.repeat(np.arange(len(each)), [len(part) for part in each]).tolist()
