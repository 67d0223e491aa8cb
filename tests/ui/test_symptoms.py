"""The page Symptoms leads from a complaint to lifecycle and finding in three clicks; a link shows the same."""

import sys

import msgspec
import pytest
from streamlit.testing.v1 import AppTest

from sojourn.diagnosis.diagnose import diagnose
from tests.further import further
from tests.metrics.synthetic import PLANTS, synthetic_run
from tests.ui.test_app import APP, html, messages, opened

COMPLAINT = {"high_ttft": "complaint-high_ttft", "high_itl": "complaint-high_itl"}
FAULTY = [
    "small_batch_cap",
    *further("slow_encode", "prefix_cache_off", "slow_network", "long_beside_chat", "overload"),
]


def click(app: AppTest, key: str) -> AppTest:
    app = app.button(key=key).click().run()
    assert not app.exception, app.exception
    return app


@pytest.mark.parametrize("plant", FAULTY)
def test_three_clicks_lead_to_the_planted_lifecycle_and_its_finding(tmp_path, plant, monkeypatch):
    run = synthetic_run(tmp_path / plant, plant=plant, requests=60)
    run.write_json("diagnosis.json", msgspec.to_builtins(diagnose(run)))
    truth, first = PLANTS[plant], diagnose(run).findings[0]
    app = click(opened(tmp_path, "symptoms", plant, monkeypatch), COMPLAINT[truth.symptom])
    looks = [button.key for button in app.button if (button.key or "").startswith("lifecycle-")]
    assert looks[0] == f"lifecycle-{truth.lifecycle}" and "leads here" in html(app)
    app = click(app, looks[0])
    things = [button for button in app.button if (button.key or "").startswith("object-")]
    assert things[0].label == "Finding"
    app = click(app, things[0].key)
    assert "sj-card" in html(app) and first.fix.change.split("<")[0][:20] in html(app)
    chosen = {name: app.query_params[name] for name in ("symptom", "lifecycle", "object")}
    assert (chosen["symptom"], chosen["lifecycle"]) == (truth.symptom, truth.lifecycle)
    shared = opened(tmp_path, "symptoms", plant, monkeypatch)
    shared.query_params.update(chosen)
    assert html(shared.run()) == html(app)


@pytest.mark.parametrize("run", ["foreign", *further("hostile", "failing", "under-way", "vllm", "server-only")])
def test_page_shows_what_it_can_of_other_runs(runs, run, monkeypatch):
    app = click(opened(runs, "symptoms", run, monkeypatch), "complaint-high_ttft")
    assert "<script" not in html(app) and "<img" not in html(app)
    if run == "foreign":
        assert "cannot be known" in html(app) and "--server-run" in html(app)


def test_wrong_choice_in_the_address_is_named_as_text_and_taken_away(runs, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["app.py", "--runs", str(runs), "--run", "chat"])
    app = AppTest.from_file(APP, default_timeout=60).run().switch_page("views/symptoms.py")
    app.query_params.update({"symptom": "<script>", "lifecycle": "x"})
    app.run()
    assert not app.exception and not app.subheader and r"\<script\>" in app.warning[0].value
    app = click(app, "leave-out")
    assert not app.warning and [each.value for each in app.subheader] == ["1 · What do you see?"]


def test_filter_of_a_link_is_visible_and_can_be_taken_away(runs, monkeypatch):
    app = opened(runs, "requests", "chat", monkeypatch)
    app.query_params.update({"class": "chat", "missed": "tpot_ms"})
    app.run()
    assert not app.exception
    assert any("requests**" in each.value for each in app.markdown)
    app = click(app, "without-missed")
    assert "missed" not in app.query_params and app.query_params["class"] == "chat"
    steps = opened(runs, "steps", "chat", monkeypatch)
    steps.query_params.update({"first": "10", "last": "12"})
    steps.run()
    assert not steps.exception and any("3 steps in" in each.value for each in steps.subheader)


def test_link_to_a_request_outside_of_the_rows_shows_it_or_says_so(runs, chat, monkeypatch):
    fastest = chat.requests.nsmallest(1, "e2e_ms").request_id.iloc[0]
    app = opened(runs, "overview", "chat", monkeypatch).switch_page("views/requests.py")
    app.query_params["request"] = fastest
    app.run()
    assert not app.exception and app.selectbox(key="request").value == fastest
    app.query_params["request"] = "nobody"
    assert "no request nobody" in messages(app.run())
