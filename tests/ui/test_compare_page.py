"""Two runs side by side in the app, and the list of runs."""

import re

import msgspec

from sojourn.metrics.compare.runs import compare_runs
from sojourn.metrics.compare.samples import samples_from
from sojourn.metrics.run.directory import RunDirectory
from sojourn.ui.run_data import load
from sojourn.ui.run_list import run_names
from sojourn.ui.tables.compare import signed
from sojourn.ui.text import number, percent
from tests.metrics.synthetic import synthetic_run
from tests.ui.test_app import html, messages, opened


def words(app) -> str:
    return " ".join(element.value for element in [*app.caption, *app.markdown])


def test_runs_of_one_schedule_are_compared_account_by_account(tmp_path, monkeypatch):
    for name, second in (("first", 1), ("second", 2)):
        run = synthetic_run(tmp_path / name, requests=150, seed=4, device_seed=second)
        run.update_meta(wall_anchor={"monotonic_ns": 0, "unix_ns": second * 10**9})
    app = opened(tmp_path, "compare", "first", monkeypatch)
    assert not app.exception, app.exception
    assert app.query_params["with"] in ("second", ["second"])
    text = html(app)
    assert any(word in text for word in ("no worse", "worse", "cannot tell")) and "no verdict" not in text
    assert "compute.decode" in text and "all accounts" in text and "taken in pairs" in words(app)
    assert len(app.get("plotly_chart")) == 5
    order = "**A**, before: first · **B**, after: second"
    assert order in words(app)
    app = opened(tmp_path, "compare", None, monkeypatch)  # the newest is B
    assert app.session_state.run == "second" and order in words(app) and "B is" in html(app)
    app = app.toggle(key="swapped").set_value(True).run()
    assert not app.exception and "**A**, before: second" in words(app)


def test_verdict_from_the_tables_of_the_app_is_that_of_the_command(tmp_path):
    runs = [synthetic_run(tmp_path / f"run{seed}", requests=300, seed=4, device_seed=seed) for seed in (1, 2)]
    held = [load(run.path) for run in runs]
    samples = {
        each.path: samples_from(RunDirectory(each.path), each.requests, each.meta["objectives"]) for each in held
    }
    from_app = compare_runs(*([run] for run in runs), read=lambda run: samples[run.path])
    from_disk = compare_runs(*([run] for run in runs))
    assert msgspec.json.encode(from_app) == msgspec.json.encode(from_disk)
    assert any(metric.metric.startswith("step") for metric in from_disk.metrics)


def test_runs_that_cannot_be_compared_say_why_and_are_shown_all_the_same(runs, monkeypatch):
    app = opened(runs, "compare", "chat", monkeypatch)
    app = app.selectbox(key="compared").select("tiny-kv").run()
    assert not app.exception and "no verdict" in html(app) and "not comparable" in html(app)
    assert "Settings and versions" in html(app) or "Load, model and machine" in html(app)
    assert "--force" not in html(app) and "compare all the same" in html(app)
    assert "sojourn verify" in words(app)
    app = app.toggle(key="force").set_value(True).run()
    assert not app.exception and "Forced: " in html(app)


def test_every_kind_of_run_can_stand_beside_another(runs, monkeypatch):
    app = opened(runs, "compare", "chat", monkeypatch)
    for other in ("foreign", "vllm", "hostile", "failing", "empty", "server-only", "under-way"):
        app = app.selectbox(key="compared").select(other).run()
        assert not app.exception, (other, app.exception)
        assert "<script" not in html(app)
        assert other not in ("foreign", "vllm") or "sojourn verify" not in words(app), other


def test_a_folder_of_one_run_has_nothing_to_compare(tmp_path, monkeypatch):
    synthetic_run(tmp_path / "only", requests=10)
    app = opened(tmp_path, "compare", "only", monkeypatch)
    assert not app.exception and "only one run" in messages(app)


def test_list_of_runs_shows_what_each_found(runs, monkeypatch):
    app = opened(runs, "runs", "chat", monkeypatch)
    assert not app.exception
    rows = {re.search(r"run=([\w-]+)", row)[1]: row for row in html(app).split("<tr>")[2:]}
    goodput = load(runs / "chat").diagnosis.goodput[0]
    for cell in (percent(goodput.attainment), number(goodput.goodput_rps), "degraded", "80"):
        assert re.search(rf">{re.escape(cell)}<(/td|span)", rows["chat"]), cell
    assert 'href="./?run=chat"' in rows["chat"]  # the Overview stands at the root of the app
    assert ">no request of it has ended" in rows["empty"].lower() and 'class="sj-whole"' in rows["chat"]
    assert "not diagnosed" in rows["foreign"] and set(rows) == set(run_names(runs))
    best = app.get_by_key("sort").set_value("attainment").run()
    assert re.search(r"run=([\w-]+)", html(best))[1] in ("chat", "tiny-kv")  # those with a diagnosis
    app = app.text_input(key="search").set_value("TINY").run()
    assert re.findall(r"run=([\w-]+)", html(app)) == ["tiny-kv"]


def test_signed_numbers_name_the_direction():
    assert [signed(value).replace("\u2212", "-") for value in (1.5, -1.5, 0.0, None)] == ["+1.50", "-1.50", "0", "–"]
