"""A filter survives the address, lets pass what it says, and can be taken away part by part."""

import re
from dataclasses import replace

import pytest

from sojourn.ui.filters import PARAMETERS, RunFilter, missed_by
from sojourn.ui.links import links_of
from sojourn.ui.narrowed import narrowed
from sojourn.ui.run_data import load
from tests.metrics.synthetic import PLANTS, synthetic_run
from tests.ui.test_app import opened


@pytest.mark.parametrize(
    "chosen",
    [
        RunFilter(), RunFilter(klasses=("chat",), missed="ttft_ms"), RunFilter(ids=("a", "b")),
        RunFilter(account="request.queue", min_share=0.3, until="ttft"), RunFilter(first=3, last=9),
        RunFilter(klasses=("a,b", "", "50%2C"), tenants=("acme",), statuses=("ok", "error"), from_s=0.5, to_s=60.0),
    ],
)  # fmt: skip
def test_filter_survives_the_address_and_loses_its_parts_one_by_one(chosen):
    assert RunFilter.of(chosen.query()) == chosen
    assert set(chosen.query()) <= set(PARAMETERS)
    for part in chosen.labels():
        assert part not in chosen.without(part).labels()


def test_parameters_that_no_filter_understands_let_all_pass():
    hostile = {"account": "<script>", "missed": "x", "min_share": "nan", "until": "y", "first": "1e99", "last": "a"}
    assert RunFilter.of(hostile | {"from": "x", "to": "inf"}) == RunFilter()


def test_filter_keeps_the_requests_that_it_names(chat):
    def passed(**parts):
        return RunFilter(**parts).requests(chat.requests, chat.meta["objectives"], chat.begin_ns)

    late = passed(klasses=("chat",), missed="tpot_ms")
    assert 0 < len(late) < len(chat.requests)
    assert set(late.klass) == {"chat"} and (late.tpot_ms > 25).all()
    most = passed(account="request.interference", min_share=0.5)
    assert (most.ledger_request_interference_ns >= 0.5 * most.e2e_ms * 1e6 * 0.98).all() and len(most)
    ids = tuple(late.request_id[:2])
    assert passed(ids=ids).request_id.tolist() == list(ids)
    early = passed(from_s=1.0, to_s=5.0)
    assert ((early.due_ns - chat.begin_ns) / 1e9).between(1.0, 5.0).all() and 0 < len(early) < len(chat.requests)
    halves = len(passed(to_s=5.0)) + len(passed(from_s=5.0))
    assert halves == len(chat.requests)  # a moment is in one window, never in two or none
    assert len(passed(statuses=("ok",))) + len(passed(statuses=("error", "timeout"))) == len(chat.requests)
    assert passed(tenants=("nobody",)).empty


def test_filter_keeps_the_steps_of_its_numbers_its_time_and_its_requests(chat):
    def passed(chosen):
        requests = chosen.requests(chat.requests, chat.meta["objectives"], chat.begin_ns)
        return chosen.steps(chat.steps, requests, chat.begin_ns)

    assert passed(RunFilter(first=5, last=7)).step.tolist() == [5, 6, 7]
    assert ((passed(RunFilter(from_s=2.0)).begin_ns - chat.begin_ns) / 1e9 >= 2.0).all()
    one = chat.requests.request_id.iloc[3]
    found = passed(RunFilter(ids=(one,)))
    expected = [step for step, ids in zip(chat.steps.step, chat.steps.request_ids, strict=True) if one in ids]
    assert found.step.tolist() == expected and expected


def test_narrowed_run_counts_what_passes_and_its_goodput_is_of_that(chat):
    chosen = RunFilter(klasses=("chat",), to_s=8.0)
    run = narrowed(chat, chosen)
    assert 0 < len(run.requests) < chat.sent == run.sent and set(run.requests.klass) == {"chat"}
    whole = run.diagnosis.goodput[0]
    assert whole.sent == len(run.requests) and whole.window.seconds == pytest.approx(8.0)
    assert sum(run.diagnosis.lifecycle_share.values()) == pytest.approx(1.0, abs=0.02)
    assert run.diagnosis.findings == chat.diagnosis.findings and run.key != chat.key
    assert (run.system.ns < chat.begin_ns + 8e9).all()


def test_words_of_an_objective_name_it_and_its_class():
    assert missed_by("ttft ≤ 500 ms for chat") == ("ttft_ms", "chat")
    assert missed_by("tpot ≤ 40 ms") == ("tpot_ms", "") and missed_by("") == ("", "")


def test_links_of_a_finding_lead_to_the_requests_and_steps_that_show_it(runs, chat):
    found = chat.diagnosis.findings[0]
    links = links_of(chat, found)
    assert {link.page for link in links} == {"requests", "steps"}
    for link in links:
        assert link.query["run"] == "chat"
        if link.page == "requests":
            assert len(RunFilter.of(link.query).requests(chat.requests, chat.meta["objectives"], chat.begin_ns))
        else:
            assert len(RunFilter.of(link.query).steps(chat.steps, chat.requests, chat.begin_ns))
    assert not links_of(load(runs / "empty"), found)


def test_a_link_counts_the_requests_that_its_finding_counts(tmp_path):
    plant = replace(PLANTS["long_beside_chat"], failing_share=0.3)
    run = load(synthetic_run(tmp_path / "refusing", plant=plant, requests=120).path)
    (found,) = [each for each in run.diagnosis.findings if each.objective.startswith("tpot")][:1]
    assert not run.requests.status.eq("ok").all()
    assert links_of(run, found)[0].label.split()[0] == re.search(r"(\d+) of \d+ requests", found.cohort)[1]


@pytest.mark.parametrize("page", ["overview", "goodput", "requests", "steps", "memory", "compute"])
def test_every_page_follows_the_filter_and_hands_it_to_the_next(runs, chat, page, monkeypatch):
    app = opened(runs, "overview", "chat", monkeypatch)
    app.query_params["class"] = "document"
    app.run()
    for name in app.query_params:
        if name != "run":
            del app.query_params[name]  # as a click in the sidebar does
            break
    app = app.switch_page(f"views/{page}.py").run() if page != "overview" else app.run()
    counted = int((chat.requests.klass == "document").sum())
    shown = " ".join(element.value for element in app.markdown)
    if page == "overview":
        assert "document" not in shown  # the part was taken away on the page itself
        return
    assert not app.exception, app.exception
    assert f"{counted} of {chat.sent} requests" in shown and app.query_params["class"] in ("document", ["document"])
    app = app.button(key="clear-filter").click().run()
    assert "class" not in app.query_params and f"{chat.sent} requests" in " ".join(e.value for e in app.markdown)


def test_choice_in_the_bar_is_written_to_the_address(runs, chat, monkeypatch):
    app = opened(runs, "requests", "chat", monkeypatch)
    app = app.multiselect(key="filter-class").select("document").run()
    assert app.query_params["class"] in ("document", ["document"])
    app = app.selectbox(key="filter-missed").select("any").run()
    assert not app.exception and app.query_params["missed"] in ("any", ["any"])
    app = app.button(key="without-class").click().run()
    assert "class" not in app.query_params and app.multiselect(key="filter-class").value == []


def test_filter_of_one_run_is_not_of_another(runs, monkeypatch):
    app = opened(runs, "requests", "chat", monkeypatch)
    app = app.multiselect(key="filter-class").select("document").run()
    app = app.sidebar.selectbox[0].select("tiny-kv").run()
    assert not app.exception and "class" not in app.query_params
