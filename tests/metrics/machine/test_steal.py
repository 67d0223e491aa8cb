"""CPU time that went to other machines: measured, told beside a benchmark, and a warning of the run that it hit."""

import io
import time
from collections import namedtuple

import pandas as pd
import psutil
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from sojourn.diagnosis.diagnose import diagnose
from sojourn.diagnosis.evidence import read_evidence
from sojourn.diagnosis.terminal.report import render
from sojourn.metrics.machine.host import STEAL_WARNS_PERCENT, company
from sojourn.metrics.machine.steal import Steal, steal_within
from sojourn.metrics.records import SystemRecord
from sojourn.metrics.records.tables import SCHEMAS, columns
from sojourn.metrics.request.goodput import window_ns
from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.run.segments import StreamSegment, read_segment
from tests.metrics.synthetic import synthetic_run, with_steal

S = 1_000_000_000
Times = namedtuple("Times", ["user", "idle", "steal"])


def system(*samples: tuple[float, float | None]) -> pd.DataFrame:
    return pd.DataFrame(samples, columns=["ns", "host_steal_percent"]).assign(ns=lambda rows: (rows.ns * S).astype(int))


def warnings_of_steal(run: RunDirectory) -> list[str]:
    return [warning for warning in diagnose(run).warnings if "hypervisor" in warning]


@pytest.fixture
def run(tmp_path):
    return synthetic_run(tmp_path / "run", requests=40)


@pytest.mark.parametrize(("percent", "warns"), [(0.0, False), (0.9, False), (1.0, False), (1.1, True), (40.0, True)])
def test_a_run_says_that_more_than_the_limit_was_stolen(run, percent, warns):
    assert STEAL_WARNS_PERCENT == 1.0
    assert len(warnings_of_steal(with_steal(run, percent))) == warns


def test_the_warning_tells_the_mean_and_the_worst_second_whole_on_a_terminal(run):
    diagnosis = diagnose(with_steal(run, 10.0, 10.0, 43.0))
    out = io.StringIO()
    Console(file=out, width=80).print(render(diagnosis))
    said = " ".join(out.getvalue().split())
    mean = read_evidence(run).steal.mean
    assert f"the hypervisor gave {mean:.1f}% of the CPU time" in said and "(43% in the worst second)" in said
    assert 18 < mean < 24 and "sojourn compare --max-steal 1%" in said


def test_only_the_measured_window_counts(run):
    """Outside of it stands what a start, a warm-up or an end lost."""
    begin, end = window_ns(run.requests())
    file = run.path / "system.parquet"
    table = pq.read_table(file).to_pandas()
    stamps = range(begin - 5 * S, end + 5 * S, S)
    table = pd.concat([table.head(1)] * len(stamps), ignore_index=True).assign(ns=list(stamps))
    inside = (table.ns > begin) & (table.ns <= end + S)
    table.assign(host_steal_percent=(~inside) * 90.0).to_parquet(file)
    assert read_evidence(run).steal == Steal(0.0, 0.0)


def test_a_sample_counts_as_far_as_its_second_lies_in_the_window():
    samples = system((3, 0.0), (1, 50.0), (2, 20.0), (4, 70.0))
    assert steal_within(samples, S * 3 // 2, 3 * S) == Steal(pytest.approx(20 / 3), 20.0)
    assert steal_within(samples, S // 2, S) == Steal(50.0, 50.0)
    assert steal_within(samples, 5 * S, 9 * S) is None


def test_a_late_sample_stands_for_all_the_time_since_the_one_before():
    assert steal_within(system((1, None), (2, 0.0), (5, 40.0)), 0, 5 * S) == Steal(30.0, 40.0)


def test_nothing_is_told_where_nobody_sampled_or_counted():
    assert steal_within(system(), 0, S) is None
    assert steal_within(system((1, None), (2, None)), 0, 2 * S) is None


def test_a_run_without_the_column_reads_as_before(run):
    whole, file = diagnose(run), run.path / "system.parquet"
    pq.write_table(pq.read_table(file).drop_columns(["host_steal_percent"]), file)
    assert run.table("system").host_steal_percent.isna().all()
    assert read_evidence(run).steal is None and diagnose(run) == whole and not warnings_of_steal(run)


def test_segments_without_the_column_have_it_empty(tmp_path):
    rows = columns("system", [SystemRecord(S, 1.0, None, None, None, 1)]).drop_columns(["host_steal_percent"])
    growing = StreamSegment(tmp_path / "0.arrows", rows.schema)
    growing.append(rows)
    growing.close()
    table = read_segment(tmp_path / "0.arrows", "system")
    pq.write_table(table.drop_columns(["host_steal_percent"]), tmp_path / "1.parquet")
    assert table.schema == SCHEMAS["system"] and table["host_steal_percent"].to_pylist() == [None]
    assert read_segment(tmp_path / "1.parquet", "system").equals(table)


@pytest.fixture
def scripted_machine(monkeypatch):
    """psutil of a machine of two cores, told what half a second of them was spent on."""

    def spends(user: float, steal: float) -> None:
        readings = iter([Times(7.0, 7.0, 7.0), Times(7 + user, 8 - user - steal, 7 + steal)])
        monkeypatch.setattr(psutil, "cpu_times", lambda: next(readings))
        monkeypatch.setattr(time, "sleep", lambda seconds: None)

    return spends


@pytest.mark.parametrize(("user", "steal", "said"), [
    (0.2, 0.01, None),
    (0.26, 0.0, "other work runs here (26% of the CPU is taken)"),
    (0.1, 0.2, "the hypervisor gives 20% of the CPU to other machines"),
    (0.5, 0.3,
     "other work runs here (50% of the CPU is taken) and the hypervisor gives 30% of the CPU to other machines"),
])  # fmt: skip
def test_company_tells_what_others_take_here_from_what_other_machines_get(scripted_machine, user, steal, said):
    scripted_machine(user, steal)
    assert company() == said
