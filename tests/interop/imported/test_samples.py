"""A run whose tool kept a sample of its requests: every rate is that of all of them, and is said to be scaled."""

import pytest

from sojourn.metrics.compare.runs import compare_runs
from sojourn.metrics.request.goodput import judged
from sojourn.metrics.results.summary import results
from sojourn.replay.verdict.measured import measured_figures
from tests.commands.program import run_program
from tests.metrics.foreign import OBJECTIVES, VllmPage, foreign_run, steady

KEPT = 5


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All requests of a load, and each fifth of them as another tool's sample."""
    folder, lives = tmp_path_factory.mktemp("samples"), steady(900, every_s=0.1)
    whole = foreign_run(folder / "whole", lives, VllmPage())
    sample = foreign_run(folder / "sample", lives[::KEPT], VllmPage())
    sample.update_meta(imported={"kept_share": 1 / KEPT})
    for run in (whole, sample):
        run.update_meta(scenario={"name": "foreign", "measure": {"usd_per_hour": 3.0}})
    return whole, sample


def test_deadlines_and_costs_of_a_sample_are_those_of_all_requests(runs):
    whole, sample = (results(judged(run.requests(), OBJECTIVES), run.meta()) for run in runs)
    (all_of_them,), (kept,) = whole.deadlines, sample.deadlines
    assert kept.output_tokens_per_s == pytest.approx(all_of_them.output_tokens_per_s, rel=0.02)
    assert kept.smooth_goodput_tokens_per_s == pytest.approx(all_of_them.smooth_goodput_tokens_per_s, rel=0.02)
    assert kept.fluidity == all_of_them.fluidity and kept.sent == 900 / KEPT
    assert sample.cost.usd_per_million_output_tokens == pytest.approx(
        whole.cost.usd_per_million_output_tokens, rel=0.02)  # fmt: skip
    assert sample.load.requested_rps == pytest.approx(whole.load.requested_rps, rel=0.02)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_sample_beside_the_whole_is_no_other_throughput_and_is_named(runs, swapped):
    sides = runs[::-1] if swapped else runs
    found = compare_runs([sides[0]], [sides[1]], metrics=["tokens_per_s", "ttft_p50"], force=True)
    tokens, ttft = found.metrics
    assert tokens.a == pytest.approx(tokens.b, rel=0.02) and ttft.a == pytest.approx(ttft.b, rel=0.02)
    name = "A" if swapped else "B"
    assert [note for note in found.notes if note.startswith(f"{name} is a sample: its tool kept 20.0%")]
    assert not [note for note in found.notes if note.startswith(f"{'AB'.replace(name, '')} is a sample")]


def test_goodput_that_a_prediction_is_held_against_is_of_all_requests(runs):
    whole, sample = (measured_figures(run)["goodput_rps"] for run in runs)
    assert sample == pytest.approx(whole, rel=0.02)


def test_a_sample_is_not_written_as_another_tool_s_whole_result(runs):
    for form in ("vllm", "aiperf", "inference-perf", "guidellm"):
        done = run_program("export", str(runs[1].path), "--to", form)
        assert done.returncode == 2
        assert "is a sample: its tool kept 20.0% of the requests" in " ".join(done.stderr.split())
