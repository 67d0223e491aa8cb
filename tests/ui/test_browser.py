"""What a reader sees in a real browser: its pages and the report, without an error, and without a network."""

import pytest

from sojourn.ui.launch import OF_ALL_RUNS, OF_NO_RUN, PAGES
from sojourn.ui.markup.run_report import render
from sojourn.ui.run_data import load
from sojourn.ui.screenshots import browser, take

pytestmark = pytest.mark.browser


def test_every_page_renders_without_an_error_and_nothing_is_cut(runs, tmp_path):
    pictures = take(runs / "chat", tmp_path, width_px=1280)
    assert [picture.page for picture in pictures] == [name for name in PAGES if name != "fleet"]
    for picture in pictures:
        assert picture.exceptions == [] and picture.console_errors == [] and picture.overflows == [], picture
        assert picture.text.startswith(picture.page.capitalize())
        if picture.page not in (*OF_ALL_RUNS, *OF_NO_RUN) or picture.page == "compare":  # of no single run
            assert "run chat ·" in picture.text  # the run that was asked for
        assert picture.file.stat().st_size > 20_000


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
