"""Published rows on the axes of a sweep, and a search for sessions that is not told as requests per second."""

import csv
import io
import json

import msgspec
import pytest

from sojourn.loadgen.search.curve import curve_csv, curves
from sojourn.loadgen.search.points import Search, search_file
from sojourn.loadgen.search.published import published_curve
from sojourn.metrics.errors import InputError
from sojourn.ui.markup.sweep_report import write_sweep_report
from tests.commands.program import run_program
from tests.interop.held.shapes import inferencex, llmd
from tests.loadgen.search.test_curve import POINTS, search


def test_row_of_inferencex_and_report_of_llm_d_stand_on_the_axes_of_a_sweep(tmp_path):
    row, report = tmp_path / "agg.json", tmp_path / "report.json"
    row.write_text(json.dumps(inferencex()))
    report.write_text(json.dumps(llmd()))
    ours = curves({"a": search(POINTS)})
    both = [*ours, published_curve(row, "p90"), published_curve(report, "p90", gpus=4)]
    assert [each.devices for each in both] == [2, 8, 4] and both[1].quantile == "p50"
    assert (both[1].points[0].tokens_per_s, both[1].points[0].unit) == (200.0, "in flight")
    rows = list(csv.DictReader(io.StringIO(curve_csv(both))))
    assert [float(each["output_tokens_per_s_per_device"]) for each in rows[-2:]] == [25.0, 50.5]
    assert [float(each["tokens_per_s_per_user"]) for each in rows[-2:]] == [50.0, 50.0]
    assert (rows[-2]["tpot_p50_ms"], rows[-2]["tpot_quantile"], rows[-2]["attainment"]) == ("20.0", "p50", "")
    assert [each["source"] for each in rows] == ["measured"] * 3 + ["published"] * 2


def test_a_report_draws_the_medians_of_a_sweep_beside_published_medians(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "sweep.json").write_bytes(msgspec.json.encode(search(POINTS)))
    (tmp_path / "agg.json").write_text(json.dumps(inferencex()))
    words = ("report", f"{tmp_path}/a", "--output", f"{tmp_path}/curve.csv")
    found = {}
    for others in ((), ("--against", f"{tmp_path}/agg.json")):
        done = run_program(*words, *others)
        assert done.returncode == 0, done.stdout + done.stderr
        found[others] = list(csv.DictReader((tmp_path / "curve.csv").open()))
    alone, beside = found.values()
    assert {row["tpot_quantile"] for row in alone} == {"p90"} and {row["tpot_quantile"] for row in beside} == {"p50"}
    assert beside[0]["tokens_per_s_per_user"] == alone[0]["median_tokens_per_s_per_user"] == "200.0"


def test_file_without_throughput_is_refused(tmp_path):
    file = tmp_path / "agg.json"
    file.write_text(json.dumps({key: value for key, value in inferencex().items() if "tput" not in key or "gpu" in key}
                               | {"tp": None}))  # fmt: skip
    with pytest.raises(InputError, match=r"agg\.json has no row with output tokens per second"):
        published_curve(file, "p90")


def test_page_of_a_search_for_sessions_counts_sessions(tmp_path):
    points = [msgspec.structs.replace(each, unit="sessions", growing=True) for each in POINTS]
    plan = search(POINTS).plan | {"seed": 1, "objectives_ms": {"tpot_ms": 30.0}}
    file = search_file(tmp_path).with_name("capacity.json")
    file.write_bytes(msgspec.json.encode(Search(kind="capacity", plan=plan, points=points)))
    page = write_sweep_report([tmp_path]).read_text()
    assert "3 rates from 2 to 8 sessions" in page and "most sessions" in page
    assert "8 requests/s" not in page and "req/s," not in page.split("<h2>Rates")[0].split("95% bracket")[0]


def test_devices_of_a_report_are_those_of_all_its_engines(tmp_path):
    """One prefill server of four GPUs, and three decode servers of eight."""

    def engine(count, **more):
        accelerator = {"model": "H200", "count": count, "parallelism": {"tp": count}}
        return {"standardized": {"kind": "inference_engine", "accelerator": accelerator, **more}}

    report, file = llmd(), tmp_path / "report.json"
    report["scenario"]["stack"] = [engine(4), {"standardized": {"kind": "generic"}}, engine(8, replicas=3)]
    file.write_text(json.dumps(report))
    assert published_curve(file, "p90").devices == 28
