"""`sojourn.open`: a run's tables and answers are those of the run directory and of the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import sojourn
from sojourn.metrics.errors import InputError, RunDataError, SojournError
from sojourn.metrics.ledger import UNACCOUNTED
from sojourn.metrics.run.listing import list_runs
from sojourn.metrics.run.segments import StreamSegment
from sojourn.scripting.documents import DOCUMENTS, json_schema, plain
from sojourn.scripting.run import Run
from sojourn.ui.run_data import read_diagnosis
from tests.commands.program import run_program
from tests.metrics.synthetic import synthetic_run

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def run(folder) -> Run:
    return sojourn.open(synthetic_run(folder / "capped", plant="small_batch_cap", requests=60, name="capped").path)


def test_tables_are_those_of_the_run(run):
    assert run.requests.equals(run.directory.requests())
    assert len(run.client) == len(run.requests) == 60
    assert run.steps.step.is_monotonic_increasing and len(run.table("system")) >= 0
    with pytest.raises(InputError, match="no table kernel; it has"):
        run.table("kernel")
    with pytest.raises(RunDataError, match="not a folder"):
        sojourn.open("nowhere")


def test_ledgers_close(run):
    """Oracle: the accounts of a request, with what none explains, sum to the client's latency."""
    row = run.requests.iloc[7]
    assert run.ledger(row.request_id).sum() == pytest.approx(row.e2e_ms, abs=0.02)  # accounts below 1 µs are left out
    assert run.ledger().sum() == pytest.approx(run.requests.e2e_ms.mean(), abs=0.02)
    totals = run.ledger_totals("chat")
    assert sum(totals.ttft_ledger_ns.values()) == pytest.approx(run.requests.ttft_ms.sum() * 1e6, rel=1e-4)
    assert abs(totals.ledger_ns.get(UNACCOUNTED, 0.0)) < 1e6 and totals.unknown == []
    with pytest.raises(RunDataError, match="no class video; it has chat"):
        run.ledger_totals("video")


def test_stored_diagnosis_is_read_and_a_fresh_one_writes_nothing(run):
    made = run.diagnose()
    assert made.state == "degraded" and not (run.path / "diagnosis.json").exists()
    stored = msgspec.structs.replace(made, headline="as stored")
    run.directory.write_json("diagnosis.json", plain(stored))
    try:
        assert run.diagnose().headline == "as stored" and run.diagnose(fresh=True).headline == made.headline
        (run.path / "diagnosis.json").write_text('{"state": 4}')  # of another version
        assert run.diagnose().headline == made.headline
    finally:
        (run.path / "diagnosis.json").unlink()


def test_diagnosis_from_before_the_last_requests_is_made_again(tmp_path):
    made = synthetic_run(tmp_path / "live", plant="small_batch_cap", requests=10)
    diagnosis = sojourn.open(made.path).diagnose()
    file = made.write_json("diagnosis.json", plain(msgspec.structs.replace(diagnosis, headline="as stored")))
    rows = made.arrow("requests")
    segment = StreamSegment(made.path / "requests.parts" / "0.arrows", rows.schema)
    segment.append(rows[:1])
    os.utime(file, ns=(0, 0))
    read = [sojourn.open(made.path).diagnose(), read_diagnosis(made)[0], *list_runs(tmp_path)]
    assert "as stored" not in {each.headline for each in read}
    os.utime(file)
    read = [sojourn.open(made.path).diagnose(), read_diagnosis(made)[0], *list_runs(tmp_path)]
    assert {each.headline for each in read} == {"as stored"}


def test_replay_takes_values_by_name(run):
    found = run.replay(max_num_seqs=[4, 16])
    assert [dict(each.change.settings) for each in found.predictions] == [{"max_num_seqs": 4}, {"max_num_seqs": 16}]
    assert found.predictions[1].attainment.median > found.unchanged.attainment.median
    with pytest.raises(InputError, match="removed is 3; give shares by account"):
        run.replay(removed=3)
    with pytest.raises(InputError, match="sequences"):
        run.replay(max_num_seqs={"sequences": 3})
    with pytest.raises(SojournError, match="max_num_seq"):
        run.replay(max_num_seq=3)


def test_what_the_records_lack_is_unknown(folder):
    alone = synthetic_run(folder / "foreign", requests=20, keep=lambda records: records.requests.clear())
    found = sojourn.open(alone.path).explain("r00001")
    assert any("no server recorded its steps" in sentence for sentence in found.unknown)
    assert found.waits_ns == {} and found.offenders == [] and found.slowest_tokens == []
    assert sum(found.ledger_ns.values()) == pytest.approx(found.e2e_ms * 1e6, rel=1e-9)
    totals = sojourn.open(alone.path).ledger_totals()
    assert totals.seen == 0 and totals.ledger_ns == {} and "20 of 20 requests" in totals.unknown[0]


def test_end_of_an_id_names_the_request(run):
    with pytest.raises(RunDataError, match="do you mean r00007"):
        run.explain("…0007")


def test_figures_are_those_of_the_app(run):
    pytest.importorskip("plotly")
    drawn = [run.figures.ledger(), run.figures.waterfall(5), run.figures.latency("e2e_ms"), run.figures.steps(),
             run.figures.attainment(), run.figures.request("r00003")]  # fmt: skip
    assert all(len(figure.data) for figure in drawn)
    with pytest.raises(SojournError, match="itl is no latency"):
        run.figures.latency("itl")


@pytest.mark.server
def test_import_loads_nothing_that_an_answer_needs():
    heavy = "{'numpy', 'pandas', 'pyarrow', 'plotly', 'torch', 'typer', 'msgspec'}"
    code = f"import sojourn, sys; assert not {heavy} & set(sys.modules), {heavy} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_documents_are_what_the_page_says(run, folder):
    """Each document that the program prints has the documented fields, in their types, and no other."""
    other = synthetic_run(folder / "healthy", requests=60)
    printed = {
        "diagnosis": ["diagnose", str(run.path)],
        "explanation": ["explain", str(run.path), "r00003"],
        "replay": ["replay", str(run.path), "--set", "max_num_seqs=8"],
        "comparison": ["compare", str(run.path), str(other.path), "--force"],
        "runs": ["runs", str(folder)],
    }
    for name, words in printed.items():
        done = run_program(*words, "--json")
        assert done.stdout, done.stderr
        document = json.loads(done.stdout)
        kind, _ = DOCUMENTS[name]
        assert document["schema"] == f"sojourn.{name}/1"
        assert set(document) == set(kind.__struct_fields__), name
        msgspec.convert(document, kind)
        assert json_schema(name)["$ref"].endswith(kind.__name__)
    (run.path / "diagnosis.json").unlink()


def test_page_is_written_from_the_code():
    from sojourn.scripting.document import page

    assert (ROOT / "docs" / "json.md").read_text(encoding="utf-8") == page(), (
        "write it again: python -m sojourn.scripting.document > docs/json.md"
    )


@pytest.mark.server
def test_plain_installation_diagnoses_and_replays(run):
    """Without the packages of any extra: verdicts, explanations and replays work, figures say what to install."""
    code = f"""
import sys
for name in ("torch", "zmq", "fastapi", "tokenizers", "plotly", "locust", "mcp"):
    sys.modules[name] = None  # as if it were not installed
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if sys.modules.get(name, 0) is None else real(name, *rest)
import sojourn
from sojourn.metrics.errors import SojournError
run = sojourn.open({str(run.path)!r})
assert run.diagnose(fresh=True).state == "degraded" and run.explain("r00003").offenders
assert run.replay(max_num_seqs=8).predictions[0].change.settings == {{"max_num_seqs": 8}}
try:
    run.figures
except SojournError as error:
    assert "pip install '.[ui]'" in str(error)
else:
    raise AssertionError("it did not refuse")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
