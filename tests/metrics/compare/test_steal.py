"""Runs compared without the seconds that other machines took: what is left out, and that a slow B gains nothing."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace as replace_record
from typer.testing import CliRunner

from sojourn.commands.program import app
from sojourn.metrics.compare.runs import compare_runs
from sojourn.metrics.compare.samples import read_run
from sojourn.metrics.compare.steal import undisturbed_requests
from sojourn.metrics.errors import InputError
from sojourn.metrics.machine.steal import undisturbed
from sojourn.metrics.run.directory import RunDirectory
from tests.metrics.synthetic import PLANTS, Plant, synthetic_run, with_steal

S = 1_000_000_000
USUAL = replace(PLANTS["healthy"], rate_rps=8.0)
SLOWER = replace(USUAL, device=replace(USUAL.device, stretched_share=1.0, stretch=1.5))
EVERY = 4  # one second of so many is another machine's
TURNS = (20.0, *[0.0] * (EVERY - 1))  # percent of the seconds


def disturb(records, factor: float) -> None:
    """Replies that were due in such a second take `factor` times as long."""
    start = records.steps[0].begin_ns

    def slowed(each):
        if (each.due_ns - start) // S % EVERY:
            return each
        later = {
            name: each.due_ns + round(factor * (getattr(each, name) - each.due_ns))
            for name in ("first_token_ns", "last_byte_ns")
        }
        chunks = [each.due_ns + round(factor * (ns - each.due_ns)) for ns in each.chunk_ns]
        return replace_record(each, chunk_ns=chunks, **later)

    records.client[:] = map(slowed, records.client)


def disturbed_run(folder, noise: int, factor: float = 1.0, plant: Plant = USUAL) -> RunDirectory:
    """Every fourth second was another machine's, from the first on."""
    return with_steal(
        synthetic_run(
            folder, plant=plant, seed=1, device_seed=noise, requests=150, keep=partial(disturb, factor=factor)
        ),
        *TURNS,
    )


@given(
    percents=st.lists(st.sampled_from([0.0, 1.0, 5.0, None]), min_size=1, max_size=8),
    begins=st.lists(st.integers(-20, 100), min_size=1, max_size=5),
    lasting=st.integers(0, 35),
)
def test_undisturbed_is_what_meets_no_such_sample_and_no_time_without_one(percents, begins, lasting):
    """Against every moment of the time looked at by itself; samples are ten long."""
    length = S // 10
    system = pd.DataFrame(
        {"ns": [(place + 1) * S for place in range(len(percents))], "host_steal_percent": percents}
    ).astype({"host_steal_percent": "float64"})

    def quiet(moment: int) -> bool:
        place = moment // 10
        return 0 <= place < len(percents) and percents[place] is not None and percents[place] <= 1.0

    found = undisturbed(system, np.array(begins) * length, lasting * length, 1.0)
    assert found.tolist() == [all(map(quiet, range(begin, begin + max(lasting, 1)))) for begin in begins]


def test_what_other_machines_took_is_no_fault_of_b(tmp_path):
    a, b = disturbed_run(tmp_path / "a", 100), disturbed_run(tmp_path / "b", 200, factor=4.0)
    latencies = {"metrics": ["ttft_mean", "e2e_mean", "attainment"], "margin": 0.1}
    assert compare_runs([a], [b], **latencies).verdict != "no worse"
    found = compare_runs([a], [b], **latencies, max_steal=0.01)
    assert found.verdict == "no worse", found
    said = [note for note in found.notes if "are left out: they met a second in which other machines" in note]
    assert [note[:2] for note in said] == ["A:", "B:"] and not any("hypervisor" in note for note in found.notes)
    assert compare_runs([a], [b], **latencies, max_steal=0.2).verdict != "no worse"  # the limit itself is allowed


def test_a_slower_system_is_judged_by_the_same_requests_and_stays_worse(tmp_path):
    """Longer requests meet more such seconds: kept for their own length, the fast ones would be left."""
    sides = [
        [read_run(disturbed_run(tmp_path / name, 1, plant=plant))] for name, plant in (("a", USUAL), ("w", SLOWER))
    ]
    (a,), (slower,) = undisturbed_requests(sides, 1.0)
    due = [(each.requests.due_ns - each.begin_ns).to_numpy() for each in (a, slower)]
    assert 20 < len(due[0]) < 140
    assert len(np.setxor1d(*(np.round(ns / 1e6) for ns in due))) <= 4  # by when the servers' samples begin
    found = compare_runs(*([each[0].run] for each in sides), metrics=["e2e_mean", "step_p50"], max_steal=0.01)
    assert [each.verdict for each in found.metrics] == ["worse", "worse"], found


def test_a_request_that_failed_in_such_a_second_failed(tmp_path):
    def fail(records):
        start = records.steps[0].begin_ns
        records.client[:] = [
            each if (each.due_ns - start) // S % EVERY else replace_record(each, status="error")
            for each in records.client
        ]

    a = disturbed_run(tmp_path / "a", 1)
    b = synthetic_run(tmp_path / "b", plant=USUAL, seed=1, device_seed=2, requests=150, keep=fail)
    with_steal(b, *TURNS)
    served = {each.metric: each for each in compare_runs([a], [b], max_steal=0.01).metrics}["served"]
    assert served.a == 1 and served.b < 0.9 and served.verdict != "no worse"


def test_what_the_client_sent_late_in_such_a_second_is_left_out_too(tmp_path):
    """A verdict has to hold without the lateness of what is compared, not of what is not."""

    def late(records):
        start = records.steps[0].begin_ns
        records.client[:] = [
            each if (each.due_ns - start) // S % EVERY else replace_record(each, sent_ns=each.due_ns + S // 4)
            for each in records.client
        ]

    b = disturbed_run(tmp_path / "b", 1)
    a = synthetic_run(tmp_path / "a", plant=USUAL, seed=1, device_seed=2, requests=150, keep=late)
    with_steal(a, *TURNS)
    asked = {"metrics": ["ttft_mean"], "margin": 0.1}
    assert "the client sent" in compare_runs([a], [b], **asked).metrics[0].reason
    assert compare_runs([a], [b], **asked, max_steal=0.01).verdict == "no worse"


def test_what_cannot_be_left_out_is_refused(tmp_path):
    a, loud = (disturbed_run(tmp_path / name, noise) for noise, name in enumerate("ac"))
    with pytest.raises(InputError, match="tokens_per_s is of the whole time of a run"):
        compare_runs([a], [with_steal(loud, 30.0)], metrics=["tokens_per_s"], max_steal=0.01)
    with pytest.raises(InputError, match="c has no request outside the seconds in which other machines took more"):
        compare_runs([a], [loud], max_steal=0.01)
    with_steal(loud, math.nan)
    with pytest.raises(InputError, match="c does not record CPU steal"):
        compare_runs([a], [loud], max_steal=0.01)


def test_the_command_takes_a_share_or_percent(tmp_path):
    a, b = disturbed_run(tmp_path / "a", 100), disturbed_run(tmp_path / "b", 200, factor=4.0)
    for limit in ("1%", "0.01"):
        told = CliRunner().invoke(app, ["compare", str(a.path), str(b.path), "--margin", "10%", "--max-steal", limit])
        assert "are left out" in " ".join(told.output.split()), told.output
    refused = CliRunner().invoke(app, ["compare", str(a.path), str(b.path), "--max-steal", "0"])
    assert str(refused.exception).startswith("--max-steal is 0; give a share above 0")
