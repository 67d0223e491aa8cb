"""The first token of an answer, apart from its reasoning, as an objective: judged where a client saw it."""

import math

import pandas as pd
import pytest

from sojourn.metrics.request.goodput import class_goodput, judged, unmeasured_objectives
from sojourn.metrics.request.objectives import WHAT_SERVERS_TELL, parse_bounds
from sojourn.metrics.run.directory import with_latencies

MS = 1_000_000
BOUND = [{"klass": "all", "ttfa_ms": 100.0}]


def clients(*answers_ms: float | None) -> pd.DataFrame:
    """Requests whose first token comes after 10 ms, and whose first answer token after so many ms."""
    return with_latencies(pd.DataFrame([
        {"klass": "chat", "status": "ok", "due_ns": 0, "first_token_ns": 10 * MS, "last_byte_ns": 300 * MS,
         "first_answer_ns": None if ms is None else ms * MS, "output_tokens": 3, "chunk_ns": [10 * MS, 300 * MS],
         "chunk_tokens": [1, 2], "last_token_ns": 300 * MS}
        for ms in answers_ms
    ]))  # fmt: skip


def test_an_answer_that_never_comes_misses_and_one_without_reasoning_begins_with_its_first_token():
    rows = judged(clients(80, 200, None, 10), BOUND)
    assert rows.ttfa_met.tolist() == [True, False, False, True] == rows.good.tolist()
    assert class_goodput(clients(80, 200, None, 10), BOUND)[0].attainment_by_objective == {"ttfa_ms": 0.5}


@pytest.mark.parametrize("answers_ms", [(10, 10), (None, None)])
def test_without_any_reasoning_apart_nobody_knows_when_the_answer_began(answers_ms):
    rows = judged(clients(*answers_ms), BOUND)
    assert rows.ttfa_met.isna().all() and unmeasured_objectives(rows) == ["ttfa_ms"]
    assert all(math.isnan(ms) for ms in rows.ttfa_ms)


def test_bounds_name_it_and_what_has_no_clients_refuses_it():
    assert parse_bounds("ttft:100 ttfa:2s") == {"ttft_ms": 100, "ttfa_ms": 2000}
    with pytest.raises(
        ValueError, match=r"ttfa \(time to first answer token\) is no part of what a server tells; give"
    ):
        parse_bounds("ttfa:2s", WHAT_SERVERS_TELL)
