"""`sojourn capacity --sessions RUN` refuses what only trials use."""

import pytest

from tests.commands.program import run_program
from tests.metrics.synthetic import synthetic_run


@pytest.mark.parametrize(("words", "sentence"), [
    (("--tolerance", "0.5"), "--tolerance: of trials"), (("--set", "max_num_seqs=2"), "--set: of trials"),
    (("--duration", "30", "--confidence", "0.9"), "--duration"), (("--highest", "0.5"), "below one session"),
    (("--slo", "tpot:50", "--attainment", "0.8"), "open load"),
])  # fmt: skip
def test_a_replay_refuses_options_of_trials(tmp_path, words, sentence):
    run = synthetic_run(tmp_path / "run")
    done = run_program("capacity", "--sessions", str(run.path), *words)
    assert done.returncode in (1, 2) and sentence in " ".join((done.stdout + done.stderr).split())
