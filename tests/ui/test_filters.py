"""A filter survives the address, lets pass what it says, and can be taken away part by part."""

import pytest

from ui.filters import RequestFilter, StepFilter, missed_by
from ui.links import links_of
from ui.run_data import load


@pytest.mark.parametrize(
    "chosen",
    [
        RequestFilter(), RequestFilter(klass="chat", missed="ttft_ms"), RequestFilter(ids=("a", "b")),
        RequestFilter(account="request.queue", min_share=0.3, until="ttft"),
    ],
)  # fmt: skip
def test_filter_survives_the_address_and_loses_its_parts_one_by_one(chosen):
    assert RequestFilter.of(chosen.query()) == chosen
    for part in chosen.labels():
        assert part not in chosen.without(part).labels()
    assert StepFilter.of(StepFilter(3, 9).query()) == StepFilter(3, 9)


def test_parameters_that_no_filter_understands_let_all_pass():
    hostile = {"account": "<script>", "missed": "x", "min_share": "nan", "until": "y", "first": "1e99", "last": "a"}
    assert RequestFilter.of(hostile) == RequestFilter() and StepFilter.of(hostile) == StepFilter()


def test_filter_keeps_the_requests_that_it_names(chat):
    objectives = chat.meta["objectives"]
    late = RequestFilter(klass="chat", missed="tpot_ms").apply(chat.requests, objectives)
    assert 0 < len(late) < len(chat.requests)
    assert set(late.klass) == {"chat"} and (late.tpot_ms > 25).all()
    most = RequestFilter(account="request.interference", min_share=0.5).apply(chat.requests, objectives)
    assert (most.ledger_request_interference_ns >= 0.5 * most.e2e_ms * 1e6 * 0.98).all() and len(most)
    ids = tuple(late.request_id[:2])
    assert RequestFilter(ids=ids).apply(chat.requests, objectives).request_id.tolist() == list(ids)
    assert StepFilter(5, 7).apply(chat.steps).step.tolist() == [5, 6, 7]


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
            assert len(RequestFilter.of(link.query).apply(chat.requests, chat.meta["objectives"]))
        else:
            assert len(StepFilter.of(link.query).apply(chat.steps))
    assert not links_of(load(runs / "empty"), found)
