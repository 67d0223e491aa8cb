"""What gauges say of a line: whether the KV cache holds another request, and how long nothing moved."""

import pandas as pd
import pytest

from sojourn.interop.sources.courses import courses_of
from sojourn.interop.sources.pressure import KV_USE, RUNNING, WAITING, waiting_of
from sojourn.interop.sources.vllm import VLLM

S = 10**9


@pytest.mark.parametrize(("uses", "fits"), [
    ([0.40] * 100, True), ([0.40] * 99 + [0.95], True), ([0.89] * 100, False), ([0.7, 0.89], False), ([], None),
])  # fmt: skip
def test_a_pool_holds_no_more_where_it_often_has_no_room_beside_its_largest_batch(uses, fits):
    running, waiting = pd.Series(8.0, range(len(uses) or 3)), pd.Series(5.0, range(len(uses) or 3))
    gauges = {RUNNING: running, WAITING: waiting} | ({KV_USE: pd.Series(uses)} if uses else {})
    assert waiting_of(gauges, 0.0, is_now=False).one_more_fits is fits


def test_an_idle_time_before_a_stop_is_no_part_of_it():
    """Nobody sends for 60 s; then the engine stands for 2 s, and four requests come within that time."""
    moments = [*range(1, 6), *range(6, 68), 68]
    seen = [(10.0, 0.05, 1.0)] * 5 + [(0.0, 0.0, 0.0)] * 62 + [(40.0, 4.4, 4.0)]
    names = ("vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_sum",
             "vllm:time_to_first_token_seconds_count")  # fmt: skip
    rows = [(at * S, value, name, {"engine": "0"}) for at, values in zip(moments, seen, strict=True)
            for name, value in zip(names, values, strict=True)]  # fmt: skip
    grown = pd.DataFrame(rows, columns=["ns", "growth", "name", "labels"])
    pauses = courses_of(VLLM, pd.DataFrame(columns=["ns", "value", "name", "labels"]), grown).pauses
    assert pauses.count == 1 and 2.0 <= pauses.longest_s <= 2.5
