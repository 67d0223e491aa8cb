"""Which runs beside a run repeat it: one thing that differs, or that nobody knows, and none does."""

import copy
import json
import re
import shutil

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from sojourn.commands.program import app
from sojourn.metrics.prediction import Change
from sojourn.metrics.run.directory import RunDirectory
from sojourn.replay.predictor import predictor_of
from tests.replay.simulated_run import random_asks, write_run
from tests.repository import ROOT, repository_files

BOUND = [{"klass": "all", "e2e_ms": 60.0}]


def foreign(run: RunDirectory, **served) -> RunDirectory:
    """The run as `sojourn load --server-run` leaves it of a vLLM with the probe: the server states its settings."""
    meta = run.meta()
    settings = {name: value for name, value in meta["engine"]["served"]["engine"].items() if name != "port"}
    meta["engine"] = {
        "base_url": "http://127.0.0.1:8000", "model": "tiny-model",
        "served": {"root": "/models/tiny", "engine": settings | served},
    }  # fmt: skip
    meta["server_versions"] = {"vllm": "0.32.0"}
    (run.path / "run.json").write_text(json.dumps(meta))
    return RunDirectory(run.path)


@pytest.fixture
def pair(tmp_path):
    """One load on two servers that others started, with places for two and for eight requests."""
    asks = random_asks(3, 120, mean_gap_ns=1_000_000)
    return [
        foreign(write_run(tmp_path / "runs" / name, asks, objectives=BOUND, max_num_seqs=size))
        for name, size in (("two", 2), ("eight", 8))
    ]


def changed(meta: dict, *place: str, value) -> dict:
    found = part = copy.deepcopy(meta)
    for name in place[:-1]:
        part = part.setdefault(name, {})
    part[place[-1]] = value
    return found


SETTING = ("engine", "served", "engine")
OTHERS = {
    "a setting": (*SETTING, "max_num_batched_tokens", 17),
    "the pool": (*SETTING, "num_kv_blocks", 9_999),
    "the checkpoint": ("engine", "served", "root", "/models/other"),
    "the name of the model": ("engine", "model", "other"),
    "the version": ("server_versions", "vllm", "0.33.0"),
    "the machine": ("server_hardware", "cpu", "another"),
    "the seed": ("seed", 2),
    "objectives": ("objectives", [{"klass": "all", "e2e_ms": 61.0}]),
    "what the scenario says": ("scenario", "description", "beside a neighbour"),
    "a server of the fleet": ("servers", [{"name": "s0", "served": {"engine": {"max_num_seqs": 3}}}]),
    "settings that nobody knows": ("engine", "served", {}),
    "a load that sent late": ("valid", False),
}


@pytest.mark.parametrize("place", [None, *OTHERS.values()], ids=["nothing", *OTHERS])
def test_a_run_with_anything_else_is_no_repeat(pair, place):
    run = pair[0]
    shutil.rmtree(pair[1].path)
    beside = run.path.parent / "beside"
    shutil.copytree(run.path, beside)
    if place is not None:
        (beside / "run.json").write_text(json.dumps(changed(run.meta(), *place[:-1], value=place[-1])))
    assert predictor_of(run).spread.repeats == (place is None)


def test_a_load_of_other_moments_is_no_repeat(pair):
    shutil.rmtree(pair[1].path)
    beside = pair[0].path.parent / "beside"
    shutil.copytree(pair[0].path, beside)
    client = pq.read_table(beside / "client.parquet")
    place = client.column_names.index("due_ns")
    late = pc.add(client["due_ns"], pa.array([10**8 * (row > 60) for row in range(len(client))]))
    pq.write_table(client.set_column(place, "due_ns", late), beside / "client.parquet")
    assert predictor_of(pair[0]).spread.repeats == 0


def test_a_run_of_another_server_beside_it_changes_no_answer(pair, tmp_path):
    alone = tmp_path / "alone" / "two"
    shutil.copytree(pair[0].path, alone)
    changes = [Change(), Change(settings={"max_num_seqs": 8})]
    beside = predictor_of(pair[0]).predict(changes)
    assert beside == predictor_of(RunDirectory(alone)).predict(changes)
    assert all(low >= 0 for each in beside for low in (each.goodput_rps.low, each.ttft_ms["p50"].low))


def test_neighbours_of_a_run_are_read_in_one_place():
    """A verb that reads a folder of runs was given it; only repeats are looked for beside a run."""
    code = [path for path in repository_files() if path.suffix == ".py" and "tests" not in path.parts]
    found = {
        str(path.relative_to(ROOT)) for path in code if 'parent.glob("*/run.json' in path.read_text(encoding="utf-8")
    }
    assert found == {"replay/repeats.py"}


def test_verify_names_what_changed_between_servers_that_others_started(pair):
    two, eight = (str(run.path) for run in pair)
    said = CliRunner(env={"COLUMNS": "120"}).invoke(app, ["verify", two, eight])
    assert "max_num_seqs=2 → max_num_seqs=8" in said.output and "a replay of two" in said.output, said.output
    assert not re.search(r"-\d", said.output.partition("error")[2].partition("hit")[0].replace("+", ""))


def test_a_repeated_run_tests_no_change_unless_it_was_repeated_on_purpose(pair):
    again = pair[0].path.parent / "again"
    shutil.copytree(pair[0].path, again)
    words = ["verify", str(pair[0].path), str(again)]
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code != 0 and "no setting differs between two and again" in str(refused.exception)
    assert "--repeat" in str(refused.exception) and "sojourn compare" in str(refused.exception)
    assert not (pair[0].path.parent / "predictions.jsonl").exists()
    allowed = CliRunner(env={"COLUMNS": "120"}).invoke(app, [*words, "--repeat"])
    assert allowed.exit_code == 0 and "nothing: the run was repeated" in allowed.output, allowed.output


def test_without_settings_verify_says_what_compare_can_say(pair):
    for run in pair:
        (run.path / "run.json").write_text(json.dumps(changed(run.meta(), "engine", "served", value={"id": "m"})))
    refused = CliRunner().invoke(app, ["verify", *(str(run.path) for run in pair)])
    said = str(refused.exception)
    assert "two and eight do not say with which settings" in said and "sojourn-probe" in said
    assert re.search(r"sojourn compare \S+ \S+` says: (no worse|worse|cannot tell)", said), said
