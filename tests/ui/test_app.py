"""Every page of the app shows every kind of run, or a sentence about it; never a traceback."""

import importlib.util
import re
import shutil
import sys
from datetime import timedelta

import pytest
from streamlit.testing.v1 import AppTest

from sojourn.interop.sources.vllm import VLLM
from sojourn.metrics.ledger import ACCOUNTS
from sojourn.metrics.usage.record import Begin, End, UsageRecord
from sojourn.ui import text
from sojourn.ui.run_data import fingerprint, load
from sojourn.ui.run_list import run_names
from sojourn.ui.tables.usage import OTHERS, tokens_over_time
from tests.further import further
from tests.metrics.synthetic import synthetic_run
from tests.metrics.usage.test_reader import NOON, kill, record, writer

APP = importlib.util.find_spec("sojourn.ui.app").origin
PAGES = ("overview", "diagnose", "goodput", "requests", "steps", "memory", "compute")


def opened(runs, page: str, run: str | None = None, monkeypatch=None) -> AppTest:
    """The app with a run chosen as a reader would, on a page."""
    monkeypatch.setattr(sys, "argv", ["app.py", "--runs", str(runs), *(["--run", run] if run else [])])
    app = AppTest.from_file(APP, default_timeout=60).run()
    if page != "overview":
        app = app.switch_page(f"views/{page}.py").run()
    return app


def html(app: AppTest) -> str:
    return "".join(element.proto.body for element in app.get("html"))


def messages(app: AppTest) -> str:
    return " ".join(element.value for element in [*app.info, *app.error, *app.warning])


@pytest.mark.parametrize("page", PAGES)
def test_page_shows_a_diagnosed_run(runs, chat, page, monkeypatch):
    app = opened(runs, page, "chat", monkeypatch)
    assert not app.exception and not app.error
    assert app.title[0].value == page.capitalize()
    assert app.caption and app.expander[0].label == "How to read this page"
    if page in ("overview", "diagnose"):
        assert "sj-headline" in html(app) and chat.diagnosis.state in html(app)
    else:
        assert app.get("plotly_chart")


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize(
    "run", ["vllm", "hostile", *further("under-way", "foreign", "server-only", "failing", "empty")]
)
def test_page_has_a_sentence_for_what_a_run_lacks(runs, run, page, monkeypatch):
    app = opened(runs, page, run, monkeypatch)
    assert not app.exception, app.exception
    assert app.title[0].value == page.capitalize()
    if run == "server-only":
        assert "No client measured this run" in messages(app)
        assert "nothing to diagnose" not in html(app) and "No request has been recorded" not in messages(app)
    expected = {
        "under-way": "still being recorded",
        "empty": "no request and no step",
        "foreign": {"requests": "No server recorded", "steps": "recorded no step"}.get(page, ""),
        "vllm": {"requests": "No server recorded", "steps": "recorded no step"}.get(page, ""),
    }.get(run, "")
    assert expected in messages(app)
    assert "<script" not in html(app) and "<img" not in html(app)
    shown = [element.value for element in [*app.caption, *app.subheader, *app.info]] + [
        text for group in app.get("button_group") for text in group.options
    ]
    assert not [text for text in shown if re.search(r"(?<!\\)(!\[x|<script|<img)", text)]  # Markdown, not escaped


def test_every_number_of_a_page_leaves_out_the_warm_up_and_the_page_says_so(tmp_path, monkeypatch):
    run = synthetic_run(tmp_path / "warm", requests=40)
    scenario = run.meta()["scenario"] | {"measure": {"warmup_requests": 3}}
    run.update_meta(scenario=scenario)
    data = load(run.path)
    assert data.warmup == 3 and len(data.requests) == 37
    assert data.steps.begin_ns.min() >= data.requests.due_ns.min()
    shown = html(opened(tmp_path, "overview", "warm", monkeypatch))
    assert "3 warm-up requests left out" in shown
    assert "n = 37" in shown and "37 succeeded" in shown
    assert not re.search(r"\b40\b (succeeded|sent)|n = 40", shown)


def test_folder_without_runs_says_how_to_record_one(tmp_path, monkeypatch):
    for folder in (tmp_path, tmp_path / "absent"):
        app = opened(folder, "overview", None, monkeypatch)
        assert not app.exception
        assert "There is no run in" in messages(app) and "sojourn run demo" in messages(app)


def test_unreadable_run_is_an_error_in_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "run.json").write_text('{"scenario": ')
    app = opened(tmp_path, "overview", None, monkeypatch)
    assert not app.exception
    assert "is not JSON" in app.error[0].value


def test_run_is_chosen_in_the_sidebar_and_by_the_address(runs, monkeypatch):
    app = opened(runs, "overview", "chat", monkeypatch)
    assert app.sidebar.selectbox[0].value == "chat"
    app = app.sidebar.selectbox[0].select("foreign").run()
    assert not app.exception and "run foreign" in html(app)
    monkeypatch.setattr(sys, "argv", ["app.py", "--runs", str(runs)])
    app = AppTest.from_file(APP, default_timeout=60)
    app.query_params["run"] = "under-way"
    assert "run under-way" in html(app.run())


def test_address_cannot_lead_out_of_the_folder_of_runs(runs, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["app.py", "--runs", str(runs)])
    app = AppTest.from_file(APP, default_timeout=60)
    app.query_params["run"] = "../../"
    app.run()
    assert not app.exception and "There is no run" in messages(app) and "sj-" not in html(app)
    assert app.sidebar.selectbox[0].value is None and app.sidebar.selectbox[0].options == run_names(runs)


def test_order_and_request_of_the_requests_page_follow_the_reader(runs, chat, monkeypatch):
    app = opened(runs, "requests", "chat", monkeypatch)
    slowest = chat.requests.nlargest(1, "e2e_ms").request_id.iloc[0]
    assert app.selectbox(key="request").value == slowest
    app = app.get_by_key("order").set_value("due_ns").run()
    assert not app.exception
    assert app.selectbox(key="request").options[0] == chat.requests.request_id.iloc[0]


def test_requests_that_were_not_served_are_listed_by_their_error(runs, monkeypatch):
    app = opened(runs, "requests", "failing", monkeypatch)
    assert "requests were not served" in " ".join(element.value for element in app.subheader)
    shown, failed = html(app), load(runs / "failing").requests.query("status != 'ok'")
    assert shown.count("connection reset") == 1  # the reason once, with how many requests it is of
    assert f">{len(failed):,}</td>" in shown
    assert all(f">{name}</td>" in shown for name in failed.request_id.head(20))


def test_growing_run_has_another_fingerprint(runs, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(runs / "under-way", copy)
    before = fingerprint(copy)
    assert before == fingerprint(copy)
    (copy / "run.json").write_text((copy / "run.json").read_text() + " ")
    assert fingerprint(copy) != before
    before = fingerprint(copy)
    segment = next((copy / "client.parts").iterdir())
    shutil.copy(segment, segment.with_name(f"99999999999999999999-1{segment.suffix}"))
    assert fingerprint(copy) != before


def test_what_the_metrics_of_a_foreign_server_show_and_do_not_stands_on_the_overview(runs, monkeypatch):
    app = opened(runs, "overview", "vllm", monkeypatch)
    seen = {name for name, sight in VLLM.sights.items() if sight.visibility != "unseen"} | {"client.lag"}
    assert not app.exception
    assert html(app).count("not visible in vLLM&#x27;s metrics</td>") == len({info.name for info in ACCOUNTS} - seen)
    assert "Counts of both sides" in html(app) and len(app.get("plotly_chart")) == 2
    assert app.get("plotly_chart") and not opened(runs, "steps", "vllm", monkeypatch).exception


def test_the_sweep_page_shows_a_sweep_or_tells_how_to_make_one(runs, tmp_path, monkeypatch):
    app = opened(runs, "sweep", "chat", monkeypatch)
    assert not app.exception and not app.error and len(app.get("plotly_chart")) == 7
    assert "requests/s meet 90%; " in html(app) and "6 of 6 runs" in html(app)
    assert "rate-8-2 is not valid: the load generator sent late" in html(app)
    assert "about 6.18 requests/s" in html(app) and "No measured rate keeps a TPOT p90 of 40 ms" in html(app)
    app.number_input(key="tpot_slo").set_value(400.0).run()
    assert "interpolated between 4 requests/s (80 tokens/s) and 8 (160)" in html(app)
    app.radio(key="axes").set_value(app.radio(key="axes").options[1]).run()
    app.number_input(key="devices").set_value(2).run()
    app.number_input(key="price").set_value(2.0).run()
    assert (
        not app.exception and "Tokens per dollar take" not in html(app) and "Devices are not reported" not in html(app)
    )
    synthetic_run(tmp_path / "chat", requests=10)
    assert "sojourn capacity SCENARIO" in messages(opened(tmp_path, "sweep", "chat", monkeypatch))


def test_the_goodput_page_states_the_goodput_its_definition_and_what_is_not_known(runs, chat, monkeypatch):
    page, whole = html(opened(runs, "goodput", "chat", monkeypatch)), chat.diagnosis.goodput[0]
    for value in (whole.goodput_rps, whole.goodput_tokens_per_s):
        assert f">{text.number(value)}<small>" in page
    assert "met every objective of their class" in page and "does not report its devices" in page
    assert whole.window.sentence() in page


def test_usage_page_shows_who_used_what_and_says_how_to_record_it(tmp_path, monkeypatch):
    run = synthetic_run(tmp_path / "run", requests=20)
    app = opened(tmp_path, "usage", "run", monkeypatch)
    assert not app.exception and "no usage records" in messages(app) and "--usage-dir" in messages(app)
    server = writer(run.path / "usage")
    for number, tenant in enumerate(["acme", "<script>", ""]):
        server.write(End(record(server.life, number, tenant=tenant, status="answered", output_tokens=10)))
    server.write(Begin(record(server.life, 9, tenant="acme")))
    kill(server)
    app = opened(tmp_path, "usage", "run", monkeypatch)
    assert not app.exception and not app.error and app.get("plotly_chart")
    assert "acme" in html(app) and "&lt;script&gt;" in html(app) and "<script" not in html(app)
    assert "4 calls, 3 answered, 1 interrupted" in " ".join(element.value for element in app.caption)
    app = app.get_by_key("usage_by").set_value("status").run()
    assert not app.exception and "interrupted" in html(app)


def test_tokens_over_time_stand_in_spans_that_a_figure_can_show():
    records = [
        UsageRecord(call=f"a-{number}", request_id="r", time=NOON + timedelta(minutes=number), output_tokens=1,
                    tenant=f"t{number % 10}")
        for number in range(100)
    ]  # fmt: skip
    tokens, span = tokens_over_time(records)
    assert span == 300 and len(tokens) == 20 and list(tokens.columns)[-1] == OTHERS and len(tokens.columns) == 8
    assert tokens.to_numpy().sum() == 100
    assert tokens_over_time([])[0].empty
