"""The page of a fleet: shown for a run of several servers, with links to each; other pages say where the steps are."""

import importlib.util
import sys

import msgspec
import pytest
from streamlit.testing.v1 import AppTest

from sojourn.diagnosis.diagnose import diagnose
from sojourn.metrics.memory.pooled_cache import pooled_cache
from sojourn.ui.figures import fleet as figures
from sojourn.ui.launch import app_command
from sojourn.ui.markup.run_report import render
from sojourn.ui.run_data import load
from sojourn.ui.run_list import run_names
from sojourn.ui.tables.fleet import cache_table, latency_table, load_table, regretted, verdict
from tests.metrics.memory.test_pooled_cache import SIZE, record, table
from tests.metrics.synthetic_fleet import synthetic_fleet

APP = importlib.util.find_spec("sojourn.ui.app").origin


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs: a fleet of two with twice the load at one server, and a run of one server."""
    folder = tmp_path_factory.mktemp("fleets")
    run = synthetic_fleet(folder / "pair", ["healthy", "tiny_kv"], requests=[60, 30])
    run.write_json("diagnosis.json", msgspec.to_builtins(diagnose(run)))
    return folder


@pytest.fixture(scope="module")
def pooled():
    prompt = list(range(13))
    rows = table([record("a", "server-0", 0, prompt, [1, 2], 0, 0), record("b", "server-1", 9, prompt, [1, 2], 0, 0),
                  record("c", "server-1", 20, prompt, [1, 2], 0, 12)])  # fmt: skip
    return pooled_cache(rows, SIZE)


def opened(runs, page: str, run: str, monkeypatch) -> AppTest:
    monkeypatch.setattr(sys, "argv", ["app.py", "--runs", str(runs), "--run", run])
    app = AppTest.from_file(APP, default_timeout=60).run()
    return app if page == "overview" else app.switch_page(f"views/{page}.py").run()


def text(app: AppTest) -> str:
    parts = [element.proto.body for element in app.get("html")]
    return " ".join([*parts, *(element.value for element in [*app.info, *app.markdown, *app.error])])


def test_page_shows_the_servers_beside_each_other(folder, monkeypatch):
    app = opened(folder, "fleet", "pair", monkeypatch)
    assert not app.exception and not app.error
    assert "2 servers behind vllm-router with round\\_robin" in text(app)
    assert "load was uneven\\: server-0 had" in text(app)
    assert len(app.get("plotly_chart")) == 3 and "no hashes of KV blocks" in text(app)  # of synthetic servers
    assert len(app.get("page_link")) == 12


@pytest.mark.parametrize("page", ["steps", "compute", "memory"])
def test_page_that_needs_steps_links_to_the_servers(folder, page, monkeypatch):
    app = opened(folder, page, "pair", monkeypatch)
    assert not app.exception
    assert "Open the run of a server" in text(app)
    assert [link.proto.label for link in app.get("page_link")] == ["server-0", "server-1"]


def test_a_server_has_all_pages_under_its_own_name(folder, monkeypatch):
    assert run_names(folder) == ["pair", "pair/server-0", "pair/server-1"]
    app = opened(folder, "steps", "pair/server-1", monkeypatch)
    assert not app.exception and app.get("plotly_chart")
    assert "run pair/server-1 " in text(app)
    assert load(folder / "pair" / "server-1").fleet is None
    command = app_command("elsewhere", folder / "pair" / "server-1")
    assert command[command.index("--runs") + 1] == str(folder) and command[-1] == "pair/server-1"


def test_page_of_a_run_of_one_server_says_so(folder, monkeypatch):
    app = opened(folder, "fleet", "pair/server-0", monkeypatch)
    assert not app.exception and "This run is of one server" in text(app)


def test_report_has_the_fleet_and_names_the_runs_with_steps(folder):
    page = render(load(folder / "pair"))
    assert "2 servers behind vllm-router" in page and "Load by server" in page
    assert "pair/server-1</code> has them" in page


def test_parts_of_the_prompt_tokens_sum_to_all(pooled):
    fig = figures.prompt_tokens(pooled)
    for row in range(3):
        assert sum(bar.x[row] for bar in fig.data) == pytest.approx(100)
    lost = next(bar for bar in fig.data if bar.name == "lost by routing")
    assert list(lost.customdata) == [12, 0, 12]


def test_losses_over_time_end_at_the_sum(pooled):
    fig = figures.regret_over_time(pooled, 0)
    lines = {line.name: line for line in fig.data}
    assert lines["server-1"].y[-1] == 12 and lines["server-0"].y[-1] == 0
    assert fig.layout.yaxis2.title.text == "lost by routing (tokens)"


def test_small_multiples_share_their_axes(folder):
    view = load(folder / "pair").fleet
    fig = figures.small_multiples(view)
    assert len(fig.data) == 2 * 5
    assert (fig.layout.yaxis2.matches == "y" and fig.layout.xaxis8.matches == "x7") or fig.layout.xaxis8.matches == "x"
    assert {line.name for line in fig.data if line.showlegend} == {
        "running", "waiting", "KV blocks in use", "tokens of a step", "device busy"
    }  # fmt: skip


def test_tables_have_a_row_of_all_and_one_of_each_server(folder, pooled):
    view = load(folder / "pair").fleet
    for rows in (load_table(view), latency_table(view)):
        assert list(rows.server) == ["fleet", "server-0", "server-1"]
    assert "is not known" in verdict(view)
    assert list(cache_table([pooled.fleet, *pooled.servers])["lost by routing (tokens)"]) == ["12", "0", "12"]
    assert list(regretted(pooled.requests, 0).request) == ["b"]
