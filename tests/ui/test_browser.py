"""What a reader sees in a real browser: its pages and the report, without an error, and without a network."""

from pathlib import Path

import msgspec
import pytest

from sojourn.diagnosis.diagnose import diagnose
from sojourn.interop.imported.read import read_result, write_run
from sojourn.metrics.usage.record import End
from sojourn.ui.launch import OF_ALL_RUNS, OF_NO_RUN, PAGES, unfilled_pages
from sojourn.ui.markup.run_report import render
from sojourn.ui.run_data import load
from sojourn.ui.screenshots import browser, take
from tests.further import further
from tests.metrics.synthetic import synthetic_run
from tests.metrics.synthetic_fleet import synthetic_fleet
from tests.metrics.usage.test_reader import record, writer

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def kinds(runs, tmp_path_factory):
    """Runs of every kind beside those of `runs`: of a load that is too large, and one that another tool measured."""
    folder = tmp_path_factory.mktemp("kinds")
    for name in ("chat", "vllm", "hostile", "server-only", "failing"):
        (folder / name).symlink_to(runs / name)
    overload = synthetic_run(folder / "overload", plant="overload", requests=80)
    overload.write_json("diagnosis.json", msgspec.to_builtins(diagnose(overload)))
    usage = writer(overload.path / "usage")
    usage.write(End(record(usage.life, 0, tenant="acme", status="answered", output_tokens=10)))
    synthetic_fleet(folder / "pair", ["healthy", "tiny_kv"], requests=[60, 30])
    (folder / "sweep-made").symlink_to(runs / "sweep-made")
    result = Path(__file__).parents[1] / "interop" / "imported" / "results" / "vllm.json"
    write_run(read_result(result)[0], folder / "imported", str(result))
    return folder


@pytest.mark.timeout(600)  # a browser on a busy machine
@pytest.mark.parametrize(
    ("name", "is_dark"),
    [("vllm", True), *further(
        ("chat", False), ("chat", True), ("pair", True), ("vllm", False), ("overload", True), ("overload", False),
        ("imported", True), ("hostile", False), ("server-only", True), ("failing", False),
    )],
)  # fmt: skip
def test_every_page_renders_without_an_error_and_nothing_is_cut_faint_or_covered(kinds, name, is_dark, tmp_path):
    pictures = take(kinds / name, tmp_path, width_px=1000, is_dark=is_dark)
    without = unfilled_pages(kinds / name)
    assert [picture.page for picture in pictures] == [page for page in PAGES if page not in without]
    for picture in pictures:
        assert not (picture.exceptions or picture.console_errors or picture.overflows), picture
        found = (picture.cut, picture.faint, picture.covered, picture.bare)
        assert not any(found), (picture.page, *found)
        assert picture.text.startswith(picture.page.capitalize())
        if picture.page not in (*OF_ALL_RUNS, *OF_NO_RUN) or picture.page == "compare":  # of no single run
            assert f"run {name} ·" in picture.text or name == "hostile"  # the run that was asked for
        if picture.page == "overview" and name == "vllm":
            assert picture.height_px <= 1600  # two screens
        assert picture.file.stat().st_size > 15_000


def test_report_of_hostile_names_runs_no_script_of_theirs_and_asks_no_network(runs, tmp_path):
    file = tmp_path / "report.html"
    file.write_text(render(load(runs / "hostile")), encoding="utf-8")
    dialogs, asked, errors = [], [], []
    with browser() as opened:
        page = opened.new_page()
        page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(file.as_uri())
        page.evaluate("window.sojournDrawAll()")
        page.wait_for_selector(".js-plotly-plot .main-svg", state="attached")
        page.wait_for_timeout(500)
        drawn = page.locator(".js-plotly-plot").count()
        images = page.locator("img").count()
    assert dialogs == [] and errors == [] and images == 0
    assert asked == [file.as_uri()]
    assert drawn > 5
