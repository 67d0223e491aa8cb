"""A link to what is not there says so on every page, and shows the figures of nothing else."""

import re
import sys
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from sojourn.ui.address import OF_PAGES
from sojourn.ui.filters import PARAMETERS
from sojourn.ui.launch import OF_ALL_RUNS, OF_NO_RUN, PAGES
from tests.further import further
from tests.ui.test_app import APP, html, messages

ABSENT = "no-such-thing"
OF_A_RUN = [page for page in PAGES if page not in (*OF_NO_RUN, *OF_ALL_RUNS)] + ["compare"]
# Each parameter of a page with what must stand beside it to be looked at.
OF_ONE_PAGE = {
    "symptom": ("symptoms", {}), "lifecycle": ("symptoms", {"symptom": "high_ttft"}),
    "object": ("symptoms", {"symptom": "high_ttft", "lifecycle": "request"}),
    "request": ("requests", {}), "order": ("requests", {}), "rows": ("requests", {}), "trait": ("requests", {}),
    "shown": ("requests", {}), "with": ("compare", {}), "force": ("compare", {}),
    "swapped": ("compare", {}), "scenario": ("start", {}),
    "sort": ("runs", {}), "sweep": ("sweep", {}),
}  # fmt: skip
MOST_LINKED = ("symptom", "with", "request")
ELSEWHERE = {"url", "slo", "search"}  # the reader's own text: nothing is known to be there
FREE = {"board", "range"}  # of a Prometheus: tests/dashboards has one


def linked(runs, monkeypatch, page: str, **parameters: str) -> AppTest:
    monkeypatch.setattr(sys, "argv", ["app.py", "--runs", str(runs)])
    app = AppTest.from_file(APP, default_timeout=60)
    for name, value in parameters.items():
        app.query_params[name] = value
    app = app.run()
    if page == "overview":
        return app
    for name, value in parameters.items():  # a link names them on its own page
        app.query_params[name] = value
    return app.switch_page(f"views/{page}.py").run()


def says_so_and_shows_nothing(app: AppTest, page: str, wanted: str = ABSENT) -> None:
    assert not app.exception, app.exception
    assert wanted in messages(app).replace("\\", ""), (page, messages(app))
    assert not app.get("plotly_chart") and not app.get("arrow_data_frame"), page
    assert not re.search(r'class="sj-(tile|table|card|branch|headline)\b', html(app)), page


@pytest.mark.parametrize("page", ["overview", "compare", *further(*OF_A_RUN[1:-1])])
def test_unknown_run_shows_no_figure_of_another_run(runs, page, monkeypatch):
    says_so_and_shows_nothing(app := linked(runs, monkeypatch, page, run=ABSENT), page)
    assert app.query_params["run"] in (ABSENT, [ABSENT]) and app.sidebar.selectbox[0].value is None
    app = app.sidebar.selectbox[0].select("chat").run()
    assert ABSENT not in messages(app) and app.query_params["run"] in ("chat", ["chat"])


@pytest.mark.parametrize("page", [*OF_ALL_RUNS[:1], *further(*OF_ALL_RUNS[1:], *OF_NO_RUN)])
def test_unknown_run_is_named_on_pages_of_all_runs_too(runs, page, monkeypatch):
    app = linked(runs, monkeypatch, page, run=ABSENT)
    assert not app.exception and ABSENT in messages(app).replace("\\", "")


@pytest.mark.parametrize("page", ["overview", *further(*OF_A_RUN[1:])])
@pytest.mark.parametrize(
    "parameters",
    [{"class": ABSENT}, *further(*({name: ABSENT} for name in PARAMETERS if name != "class"),
                                 {"class": f"chat,{ABSENT}"}, {"clas": "chat"})],
)  # fmt: skip
def test_unknown_filter_shows_no_figure_of_the_whole_run(runs, page, parameters, monkeypatch):
    app = linked(runs, monkeypatch, page, run="chat", **parameters)
    wanted = "clas" if "clas" in parameters else ABSENT
    says_so_and_shows_nothing(app, page, wanted)
    app = app.button(key="leave-out").click().run()
    assert wanted not in messages(app) and not set(parameters) & set(app.query_params) - {"class"}


@pytest.mark.parametrize(
    "name", ["symptom", "with", "request", *further(*sorted(set(OF_ONE_PAGE) - {"symptom", "with", "request"}))]
)
def test_unknown_value_of_a_page_is_named_there(runs, name, monkeypatch):
    page, beside = OF_ONE_PAGE[name]
    app = linked(runs, monkeypatch, page, run="chat", **beside, **{name: ABSENT})
    assert not app.exception and ABSENT in messages(app).replace("\\", ""), (messages(app), app.exception)
    if name in ("with", "request"):
        says_so_and_shows_nothing(app, page)


def test_every_parameter_of_the_pages_is_judged_here():
    named = set()
    for file in Path(APP).parent.glob("views/*.py"):
        source = file.read_text()
        named |= set(re.findall(r'query_params(?:\.get\(|\[)"(\w+)"', source))
        named |= set(re.findall(r'key="(\w+)"[^)]*bind="query-params"', source))
    assert named - {"run"} <= set(OF_PAGES), named
    assert set(OF_PAGES) <= set(OF_ONE_PAGE) | ELSEWHERE | FREE
