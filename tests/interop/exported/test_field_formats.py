"""The formats of the field's own pages: a row of InferenceX and llm-d's Benchmark Report, as our readers take them."""

import json

import pandas as pd
import pytest
from typer.testing import CliRunner

from sojourn.commands.export import vllm_document
from sojourn.commands.program import app
from sojourn.interop.exported.inferencex_row import inferencex_row
from sojourn.interop.exported.llmd_report import llmd_report
from sojourn.interop.exported.vllm_result import vllm_result
from sojourn.interop.held.registry import read_held
from sojourn.metrics.errors import InputError
from tests.interop.exported.test_vllm_result import META, two_and_a_failure
from tests.metrics.synthetic import synthetic_run

CLOSED = META | {"scenario": META["scenario"] | {"arrivals": {"process": "concurrency", "in_flight": 4}}}


def row(meta=CLOSED, **known) -> dict:
    return inferencex_row(vllm_result(two_and_a_failure(), meta, detailed=False), meta, **known)


def test_row_of_inferencex_divides_by_the_gpus_and_is_read_again():
    one, two = row(gpus=1, hardware="h100"), row(gpus=2, hardware="h100")
    assert one["output_tput_per_gpu"] == pytest.approx(6 / 0.42) == pytest.approx(2 * two["output_tput_per_gpu"])
    assert one["median_intvty"] == pytest.approx(1 / one["median_tpot"]) and one["mean_ttft"] == pytest.approx(0.175)
    assert (one["conc"], one["isl"], one["osl"], one["hw"]) == (4, 10, 3, "h100")
    held = read_held(json.dumps(one), "agg.json")[0]
    assert held.figures.value("ttft_ms") == pytest.approx(175) and held.figures.load["max_concurrency"] == 4
    assert held.figures.value("output_tokens_per_s_per_gpu", "rate") == pytest.approx(6 / 0.42)


@pytest.mark.parametrize(
    ("meta", "known", "sentence"),
    [(CLOSED, {}, "does not know the number of GPUs"), (META, {"gpus": 1}, "is of a closed loop")],
)
def test_run_without_such_a_row_is_refused(meta, known, sentence):
    with pytest.raises(InputError, match=sentence):
        row(meta, **known)


def test_report_of_llm_d_has_units_on_every_statistic_and_is_read_again():
    frame = two_and_a_failure().assign(session_id=["x-s000000", "x-s000000.a", "x-s000001"])
    report = llmd_report(frame, CLOSED, "run", gpus=2, hardware="h100")
    held = read_held(json.dumps(report), "report.yaml")[0]
    assert held.figures.value("ttft_ms") == pytest.approx(175) and held.settings["gpus"] == 2
    assert held.figures.value("output_tokens_per_s", "rate") == pytest.approx(6 / 0.42)
    sessions = report["results"]["session_performance"]["sessions"]
    assert (sessions["total"], sessions["succeeded"], sessions["failed"], sessions["total_events"]) == (2, 1, 1, 3)
    assert report["scenario"]["load"]["standardized"]["concurrency"] == 4


def test_report_names_no_number_of_gpus_that_nobody_knows():
    frame: pd.DataFrame = two_and_a_failure().assign(session_id="")
    stack = llmd_report(frame, META, "run")["scenario"]["stack"]
    assert stack[0]["standardized"] == {"kind": "generic", "tool": "unknown", "tool_version": "unknown"}


def test_run_beside_its_own_row_is_as_fast_per_gpu_and_per_user(tmp_path):
    """`compare RUN ROW`, on the axes of published rows."""
    run = synthetic_run(tmp_path / "run", requests=40)
    meta = run.meta()
    meta["engine"]["tensor_parallel"] = 2
    run.write_json("run.json", meta)
    closed = vllm_document(run, detailed=False) | {"max_concurrency": 4}
    (tmp_path / "row.json").write_text(json.dumps(inferencex_row(closed, meta)))
    said = CliRunner().invoke(app, ["compare", str(run.path), str(tmp_path / "row.json"), "--json"]).output
    ratios = {each["name"]: each["after"] / each["before"] for each in json.loads(said)["figures"]}
    assert ratios["output_tokens_per_s_per_gpu"] == pytest.approx(1)
    assert ratios["tokens_per_s_per_user"] == pytest.approx(1) == pytest.approx(ratios["ttft_ms"])
