"""`sojourn dev faults score` on recorded runs: its figures, and what it refuses."""

import json

from typer.testing import CliRunner

from sojourn.commands.faults import faults
from sojourn.diagnosis.score.truth import write_fault
from tests.diagnosis.score.judgements import KV, control, fault
from tests.metrics.foreign import Life, VllmPage, foreign_run, steady


def test_score_counts_a_control_and_says_what_cannot_be_scored(tmp_path):
    write_fault(foreign_run(tmp_path / "chat", steady(20), VllmPage()), control(repeat=1))
    late = [Life(due_s=0.2 * number, queue_s=0.3 * number) for number in range(30)]
    write_fault(foreign_run(tmp_path / "kv", late, VllmPage()), fault(KV, repeat=1, base="chat"))
    arguments = ["score", str(tmp_path), "--level", "client", "--processes", "1"]
    scored = json.loads(CliRunner().invoke(faults, [*arguments, "--json"]).stdout)
    assert scored["command"] == f"sojourn dev faults score {tmp_path.name} --write" and scored["fit"] is None
    (level,) = scored["levels"]
    assert level["faults"] == level["controls"] == 1 and level["shares"]["false_alarm"]["right"] == 0
    shown = CliRunner().invoke(faults, arguments).stdout
    assert "misses at the level client: 1" in shown and "kv_pool/block_leak" in shown
    refused = CliRunner().invoke(faults, [*arguments, "--level", "everything"])
    assert refused.exit_code and "client, metrics, requests, steps, kernels" in str(refused.exception)
    assert "needs more runs" in str(CliRunner().invoke(faults, [*arguments, "--calibrate"]).exception)
