"""The words of `sojourn replay`, and what it prints."""

import json

import pytest
from typer.testing import CliRunner

from sojourn.commands.program import app
from sojourn.engine.options import assignments
from sojourn.metrics.errors import InputError
from sojourn.metrics.prediction import Change, settings_text
from sojourn.scripting.changes import grid, label
from tests.replay.simulated_run import random_asks, write_run


def test_commas_make_a_grid_over_all_keys():
    found = grid(["max_num_seqs=2,4", "device_speed=1,2", "removed.client.network=0.5", "policy=fcfs"])
    assert len(found) == 4
    assert found[0] == Change(settings={"max_num_seqs": 2, "policy": "fcfs"}, removed={"client.network": 0.5})
    assert [label(change) for change in found[2:]] == [
        "max_num_seqs=4 policy=fcfs removed.client.network=0.5",
        "max_num_seqs=4 policy=fcfs device_speed=2 removed.client.network=0.5",
    ]
    assert [change for change in found if grid(label(change).split()) == [change]] == found


def test_words_of_a_setting_are_read_as_a_finding_writes_them():
    settings = {"graphs": "on", "overlap": "off", "prefix_caching": True, "priority_ageing": None, "policy": "fcfs"}
    words = settings_text(settings).split(", ")
    assert assignments(words, "--set") == settings and grid(words) == [Change(settings=settings)]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["max_num_seqs"], "is not KEY=VALUE"),
        (["max_num_seqs=1", "max_num_seqs=2"], "names max_num_seqs twice"),
        (["routing=random"], "give one of round-robin"),
        (["device_speed=fast"], "give a number"),
        (["replicas=1.5"], "give a whole number"),
        (["max_num_seqs=,"], "is not KEY=VALUE"),
        (["policy=["], "give a number, a word"),
        (["max_num_seqs=" + ",".join(map(str, range(1, 600)))], "at most 500"),
    ],
)
def test_words_that_are_no_change_get_a_sentence(words, complaint):
    with pytest.raises(InputError, match=complaint):
        grid(words)


def test_replay_prints_the_recorded_run_its_own_check_and_each_change(tmp_path):
    run = write_run(tmp_path / "run", random_asks(7, 70, mean_gap_ns=8_000_000))
    shown = CliRunner().invoke(app, ["replay", str(run.path), "--set", "max_num_seqs=1", "--set", "kv_scale=1,2"])
    assert shown.exit_code == 0, shown.output
    for line in ("recorded", "replayed unchanged", "max_num_seqs=1\n", "max_num_seqs=1 kv_scale=2"):
        assert line in shown.output
    found = json.loads(CliRunner().invoke(app, ["replay", str(run.path), "--set", "max_num_seqs=1", "--json"]).output)
    assert found["unchanged"]["ttft_ms"]["p50"]["median"] < found["predictions"][0]["ttft_ms"]["p50"]["median"]
