"""Two runs side by side in the app, and the list of runs."""

from sojourn.ui.run_data import load
from sojourn.ui.tables.compare import signed
from tests.metrics.synthetic import synthetic_run
from tests.ui.test_app import html, messages, opened


def words(app) -> str:
    return " ".join(element.value for element in [*app.caption, *app.markdown])


def test_runs_of_one_schedule_are_compared_account_by_account(tmp_path, monkeypatch):
    for name, device_seed in (("first", 1), ("second", 2)):
        synthetic_run(tmp_path / name, requests=150, seed=4, device_seed=device_seed)
    app = opened(tmp_path, "compare", "first", monkeypatch)
    assert not app.exception, app.exception
    assert app.query_params["b"] in ("second", ["second"])
    text = html(app)
    assert any(word in text for word in ("PASS", "FAIL", "INCONCLUSIVE")) and "no verdict" not in text
    assert "compute.decode" in text and "all accounts" in text and "taken in pairs" in words(app)
    assert len(app.get("plotly_chart")) == 5
    app = app.button[[button.label for button in app.button].index("Swap A and B")].click().run()
    assert not app.exception and "run second" in html(app) and app.selectbox(key="compared").value == "first"


def test_runs_that_cannot_be_compared_say_why_and_are_shown_all_the_same(runs, monkeypatch):
    app = opened(runs, "compare", "chat", monkeypatch)
    app = app.selectbox(key="compared").select("tiny-kv").run()
    assert not app.exception and "no verdict" in html(app) and "not comparable" in html(app)
    assert "Settings and versions" in words(app) or "Load, model and machine" in words(app)
    app = app.toggle(key="force").set_value(True).run()
    assert not app.exception and "Forced: " in html(app)


def test_every_kind_of_run_can_stand_beside_another(runs, monkeypatch):
    app = opened(runs, "compare", "chat", monkeypatch)
    for other in ("foreign", "vllm", "hostile", "failing", "empty", "server-only", "under-way"):
        app = app.selectbox(key="compared").select(other).run()
        assert not app.exception, (other, app.exception)
        assert "<script" not in html(app)


def test_a_folder_of_one_run_has_nothing_to_compare(tmp_path, monkeypatch):
    synthetic_run(tmp_path / "only", requests=10)
    app = opened(tmp_path, "compare", "only", monkeypatch)
    assert not app.exception and "only one run" in messages(app)


def test_list_of_runs_shows_what_each_found(runs, monkeypatch):
    app = opened(runs, "runs", "chat", monkeypatch)
    assert not app.exception
    table = app.dataframe[0].value.set_index("run")
    goodput = load(runs / "chat").diagnosis.goodput[0]
    assert table.loc["chat", "attainment"] == goodput.attainment
    assert table.loc["chat", "goodput (req/s)"] == goodput.goodput_rps and table.loc["chat", "verdict"] == "degraded"
    assert table.loc["foreign", "verdict"] == "not diagnosed" and table.loc["chat", "requests"] == 80
    app = app.text_input(key="search").set_value("tiny").run()
    assert app.dataframe[0].value.run.tolist() == ["tiny-kv"]


def test_signed_numbers_name_the_direction():
    assert [signed(value).replace("\u2212", "-") for value in (1.5, -1.5, 0.0, None)] == ["+1.50", "-1.50", "0", "–"]
