"""What a request waited in the socket for a busy event loop is the front's time, and the ledger still closes."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sojourn.diagnosis.shares import closure
from sojourn.metrics.ledger import ACCOUNTS
from sojourn.metrics.records.tables import SCHEMAS
from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.run.front_turns import Turns
from tests.metrics.simulated_server import MS
from tests.metrics.synthetic import synthetic_run


def with_turns(run: RunDirectory, begins: list[int], lasted: list[int]) -> RunDirectory:
    """The run, whose first sample of the machine has these turns of the front's loop."""
    rows = run.table("system")
    rows["loop_turn_begin_ns"] = [begins] + [[]] * (len(rows) - 1)
    rows["loop_turn_ns"] = [lasted] + [[]] * (len(rows) - 1)
    pq.write_table(pa.Table.from_pandas(rows, SCHEMAS["system"], preserve_index=False), run.path / "system.parquet")
    return run


def test_time_within_turns_is_counted_once_and_only_between_the_two_moments():
    turns = Turns.of(pd.DataFrame({"loop_turn_begin_ns": [[100], [10, 40]], "loop_turn_ns": [[50], [10, 5]]}))
    begins, ends = np.array([0.0, 15.0, 20.0, 42.0, 200.0, np.nan]), np.array([300.0, 18.0, 40.0, 120.0, 300.0, 5.0])
    assert turns.within(begins, ends) == pytest.approx([65, 3, 0, 23, 0, np.nan], nan_ok=True)


def test_a_run_without_turns_keeps_its_network(tmp_path):
    assert (synthetic_run(tmp_path, requests=20).requests().front_turns_ns == 0).all()


@pytest.mark.parametrize("blocked_ms", [2, 30])
def test_the_way_in_is_the_fronts_as_far_as_its_loop_was_busy(tmp_path, blocked_ms):
    run = synthetic_run(tmp_path, plant="slow_network", requests=40)
    before = run.requests()
    request = before.iloc[7]
    after = with_turns(run, [int(request.arrived_ns) - blocked_ms * MS], [blocked_ms * MS]).requests()
    for prefix in ("ledger", "ttft"):
        for column, sign in ((f"{prefix}_client_network_ns", -1), (f"{prefix}_request_admission_ns", 1)):
            moved = after[column].astype("float64") - before[column].astype("float64")
            assert moved[7] == sign * blocked_ms * MS
    booked = [f"ledger_{info.column}" for info in ACCOUNTS]
    sums = [rows[booked].astype("float64").sum(axis=1) for rows in (before, after)]
    assert sums[0].tolist() == sums[1].tolist()
    assert closure(after.assign(status="ok")) == closure(before.assign(status="ok"))
