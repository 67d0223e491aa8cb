"""What a summary says of objectives, and the command for two files of one kind."""

import json

from sojourn.triage.conclude import triage_given
from tests.interop.held.shapes import vllm


def test_quantiles_bound_the_share_that_kept_an_objective_and_a_mean_does_not(tmp_path):
    file = tmp_path / "result.json"
    file.write_text(json.dumps(vllm()))
    found = triage_given([str(file)], bounds={"ttft_ms": 500.0, "tpot_ms": 10.0, "itl_ms": 30.0})
    certain = [each.sentence for each in found.certain]
    assert any("50% to 99% of the served requests kept TTFT ≤ 500 ms" in each for each in certain)
    assert any("0% to 50% of the served requests kept TPOT ≤ 10 ms" in each for each in certain)
    assert any("kept ITL ≤ 30 ms: the summary has only its mean" in each for each in found.unknowable)
    assert any("every objective" in each for each in found.unknowable) and found.state == "problem"


def test_two_summaries_are_for_compare_and_one_is_not(tmp_path):
    files = [tmp_path / name for name in ("before.json", "after it.json")]
    for file in files:
        file.write_text(json.dumps(vllm()))
    assert triage_given([*map(str, files)]).next == f"sojourn compare {files[0]} '{files[1]}'"
    assert "compare" not in triage_given([str(files[0])]).next
