"""Two runs side by side: the accounts close, the intervals hold what was planted, and pairs are of one schedule."""

from dataclasses import replace

import numpy as np
import pytest

from sojourn.metrics.compare.samples import read_run
from sojourn.metrics.compare.sides import (
    ALL_ACCOUNTS,
    class_comparisons,
    ledger_difference,
    side_by_side,
)
from sojourn.metrics.compare.verdict import statistic
from tests.metrics.compare.test_compare import USUAL, run_of

SLOWER = replace(USUAL, device=replace(USUAL.device, slowdown=1.3, slow_from=0.0))


@pytest.fixture(scope="module")
def sides(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sides")
    a, same, slower, other = (
        run_of(folder / "a", USUAL, 1, 1), run_of(folder / "same", USUAL, 1, 2),
        run_of(folder / "slower", SLOWER, 1, 3), run_of(folder / "other", USUAL, 7, 4),
    )  # fmt: skip
    return {"a": read_run(a), "same": read_run(same), "slower": read_run(slower), "other": read_run(other)}


@pytest.mark.parametrize("prefix", ["ledger", "ttft"])
@pytest.mark.parametrize("b", ["same", "other"])
def test_accounts_of_both_sides_and_their_differences_sum_to_the_latency(sides, prefix, b):
    found = ledger_difference(sides["a"], sides[b], prefix)
    *rows, total = found.rows
    assert total.account == ALL_ACCOUNTS and found.paired is (b == "same")
    for name in ("a_ms", "b_ms", "difference_ms"):
        assert sum(getattr(row, name) for row in rows) == pytest.approx(getattr(total, name), abs=1e-6)
    latency = sides["a"].requests["e2e_ms" if prefix == "ledger" else "ttft_ms"].astype("float64")
    assert total.a_ms == pytest.approx(latency.mean(), rel=0.01)


def test_slower_device_shows_in_its_account_and_a_run_like_it_does_not(sides):
    slower = {row.account: row for row in ledger_difference(sides["a"], sides["slower"]).rows}
    assert slower["compute.decode"].low_ms > 0 and slower[ALL_ACCOUNTS].low_ms > 0
    same = {row.account: row for row in ledger_difference(sides["a"], sides["same"]).rows}
    assert abs(same[ALL_ACCOUNTS].difference_ms) < 0.1 * slower[ALL_ACCOUNTS].difference_ms


def test_run_that_is_too_short_for_windows_has_figures_and_the_reason(sides):
    short = [side._replace(requests=side.requests.head(20)) for side in (sides["a"], sides["same"])]
    found = ledger_difference(*short)
    assert "too short" in found.no_interval and all(row.low_ms is None for row in found.rows) and found.rows
    (group,) = class_comparisons(*short)
    assert group.no_interval and all(each.low is None and each.ratio is not None for each in group.metrics)


def test_class_that_is_slower_is_seen(sides):
    (group,) = class_comparisons(sides["a"], sides["slower"])
    tpot = next(each for each in group.metrics if each.metric == "tpot_p50")
    assert tpot.low > 1.05 and tpot.verdict == "worse"
    assert statistic is not None and group.requests == (150, 150)


def test_pairs_are_of_one_schedule_and_name_the_account_that_changed(sides):
    table = side_by_side(sides["a"], sides["slower"])
    assert len(table) == len(sides["a"].requests) and (table.e2e_ms_b > table.e2e_ms_a).mean() > 0.9
    assert (table.account == "compute.decode").mean() > 0.5
    assert side_by_side(sides["a"], sides["other"]).empty


def test_side_without_a_servers_records_has_no_ledger(sides):
    client_only = sides["a"].requests.assign(unaccounted_ns=np.nan)
    assert ledger_difference(sides["a"]._replace(requests=client_only), sides["same"]) is None
