"""The time in which the engine stood still is the engine's: no request is blamed for it, and every ledger closes."""

import shutil
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from sojourn.diagnosis.diagnose import diagnose
from sojourn.diagnosis.explanation import explanation_of
from sojourn.diagnosis.step_facts import step_facts
from sojourn.metrics.ledger import ACCOUNTS
from sojourn.metrics.run.directory import RunDirectory, frame_of
from tests.metrics.simulated_server import MS, Device, S, Settings
from tests.metrics.synthetic import Plant, synthetic_run

STALL = "ledger_compute_stall_ns"
STEP = 150
CAPPED = Plant(rate_rps=14.0, device=Device(stalled_steps=(STEP,), stall_ns=20 * S), settings=Settings(max_num_seqs=4))
CALM = Plant(device=Device(stalled_steps=(STEP,), stall_ns=20 * S))


def run_of(path, plant: Plant) -> RunDirectory:
    return synthetic_run(path / "run", plant=plant, requests=120)


def ledgers(rows, prefix: str = "ledger") -> np.ndarray:
    names = [f"{prefix}_{info.column}" for info in ACCOUNTS if info.lifecycle != "client"]
    return rows[names].astype("float64").fillna(0).to_numpy()


@pytest.fixture(scope="module", params=["calm", "capped"])
def run(request, tmp_path_factory):
    return run_of(tmp_path_factory.mktemp("stall"), CALM if request.param == "calm" else CAPPED)


def test_the_split_moves_time_and_neither_makes_nor_loses_any(run):
    written, read = frame_of(run._recorded("requests")), run.table("requests")
    assert (read[STALL] > 0).any()
    for prefix in ("ledger", "ttft"):
        assert (ledgers(written, prefix).sum(axis=1) == ledgers(read, prefix).sum(axis=1)).all()
    assert (ledgers(read) >= 0).all()
    assert run.requests().unaccounted_ns.dropna().abs().max() < MS


def test_rows_that_were_read_and_written_again_are_not_split_again(run, tmp_path):
    """As a join of two recordings and a fleet's folder write them."""
    copied = shutil.copytree(run.path, tmp_path / "copy")
    rows = run.arrow("requests")
    pq.write_table(rows, copied / "requests.parquet")
    assert RunDirectory(copied).arrow("requests").equals(rows)


def test_everybody_who_was_in_the_server_lost_the_same_time_to_the_stall(run):
    steps, requests = run.table("steps"), run.table("requests")
    stalled = steps[steps.step == STEP].iloc[0]
    there = requests[(requests.arrived_ns < stalled.end_ns - 20.1 * S) & (requests.finished_ns >= stalled.end_ns)]
    assert len(there) and (there[STALL] > 19.5 * S).all() and (there[STALL] < 20 * S).all()
    came = requests[(requests.arrived_ns > stalled.end_ns - 19 * S) & (requests.arrived_ns < stalled.end_ns - S)]
    assert len(came) > 5 and ((came[STALL] / (stalled.end_ns - came.arrived_ns)).astype(float) > 0.9).all()
    gone = requests[requests.finished_ns < stalled.begin_ns]
    assert len(gone) and (gone[STALL] == 0).all()


def test_the_stall_is_what_explain_says_and_no_request(run):
    found = explanation_of(run, run.table("requests").sort_values(STALL).request_id.iloc[-1])
    assert all(each.delayed_ns < 5 * S for each in found.offenders)
    assert max(found.ledger_ns, key=found.ledger_ns.get) == "compute.stall"
    gap = explanation_of(run, next(name for name, cell in _tokens(run) if _spans(run, cell))).slowest_tokens[0]
    assert gap.why.endswith(f"compute.stall: the engine stood still in step {STEP}")
    assert abs(sum(gap.accounts_ns.values()) - gap.length_ns) < len(gap.accounts_ns) + 1


def _tokens(run: RunDirectory):
    rows = run.table("requests")
    return zip(rows.request_id, rows.token_ns, strict=True)


def _spans(run: RunDirectory, stamps) -> bool:
    """Whether a stalled step lies between two of its tokens."""
    return bool(len(stamps) > 1 and np.diff(stamps).max() > 19 * S)


def test_controls_have_no_stall(tmp_path):
    """Noise, a device that becomes slower, long prompts beside short ones, and a run with few steps."""
    for name in ("healthy", "slow_device", "long_beside_chat", "tiny_kv", "overload"):
        run = synthetic_run(tmp_path / name, plant=name, requests=120)
        assert (run.table("requests")[STALL].fillna(0) == 0).all(), name
        assert not any(each.key == "engine_stall" for each in diagnose(run).findings)


def test_a_stall_is_a_finding_of_its_own(run):
    found = diagnose(run)
    stall = next(each for each in found.findings if each.key == "engine_stall")
    assert f"step {STEP} took" in stall.cause and stall.rival_key == "noisy_neighbour" and stall.kind == "fault"
    assert found.findings[0] is stall or found.findings[0].key == "batch_cap"


def test_a_stall_is_no_slow_device(run):
    facts = step_facts(run.table("steps"))
    assert facts.slowdown < 1.1 and facts.worst_slowdown < 1.2


def test_a_stall_that_made_nobody_late_is_a_warning(tmp_path):
    plant = replace(CALM, device=Device(stalled_steps=(STEP,), stall_ns=150 * MS))
    found = diagnose(run_of(tmp_path, plant))
    assert not any(each.key == "engine_stall" for each in found.findings)
    assert any(f"step {STEP} took" in each for each in found.warnings)
