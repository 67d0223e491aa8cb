"""Sources translate what servers write, name families that exist, and their page of documentation is up to date."""

from pathlib import Path

import pytest

from sojourn.interop.sources.document import render_markdown
from sojourn.interop.sources.registry import SOURCES, recognise
from sojourn.interop.sources.sojourn import SOJOURN
from sojourn.interop.sources.translate import names_that_grow
from sojourn.interop.sources.vllm import VLLM
from sojourn.metrics.catalog.catalog import METRIC_BY_NAME
from sojourn.metrics.ledger import ACCOUNT_BY_NAME, ACCOUNTS, SERVER_ACCOUNTS

DOCS = Path(__file__).parents[3] / "docs"
KNOWN = pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.key)


@KNOWN
def test_every_translation_is_into_a_family_of_the_catalogue_with_its_labels(source):
    for item in source.translations:
        metric = METRIC_BY_NAME[item.ours]
        told = {label for label, _ in item.labels} | set(item.same_labels)
        assert told <= set(metric.labels), item
        for label, value in item.labels:
            known = {values[metric.labels.index(label)] for values in metric.values}
            assert not known or value in known, item
        assert item.largest <= (metric.kind == "gauge" and metric.unit == "ratio"), item


@KNOWN
def test_every_account_has_its_word_and_every_word_its_account(source):
    assert set(source.sights) <= set(ACCOUNT_BY_NAME) - {"client.lag"}
    measured = {account for span in source.spans for account in span.accounts}
    assert measured <= set(ACCOUNT_BY_NAME) and set(source.latency.outside) <= set(ACCOUNT_BY_NAME)
    for name, sight in source.sights.items():
        assert sight.visibility in ("seen", "partly", "unseen") and sight.why and not sight.why.endswith(".")
        if sight.visibility == "seen":
            assert (name,) in {span.accounts for span in source.spans}, f"{name} has no sum of its own"


def test_foreign_servers_see_no_account_whole():
    for source in SOURCES:
        if source is not SOJOURN:
            assert {sight.visibility for sight in source.sights.values()} <= {"partly", "unseen"}


def test_our_own_server_shows_every_account_of_its_ledger():
    own = SOJOURN
    assert {span.accounts for span in own.spans} == {(info.name,) for info in SERVER_ACCOUNTS}
    assert {info.name for info in ACCOUNTS} == {*own.sights, "client.lag"}


def test_a_page_is_recognised_by_its_names_and_ours_before_the_names_that_it_lends():
    assert recognise({"vllm:num_requests_running", "python_info"}).key == "vllm"
    assert recognise({"sglang:token_usage"}).key == "sglang"
    assert recognise({"vllm:num_requests_running", "sojourn_request_running"}).key == "sojourn"
    assert recognise({"llamacpp:requests_processing", "up"}).key == "llama.cpp"
    assert recognise({"dynamo_frontend_requests_total", "vllm:num_requests_running"}).key == "vllm"
    assert recognise({"nv_inference_count", "vllm:num_requests_running"}).key == "vllm"
    assert recognise({"nv_inference_count", "nv_gpu_utilization"}).key == "triton"
    assert recognise({"nv_gpu_utilization", "up"}) is None and recognise(set()) is None


def test_tokens_of_a_step_are_not_taken_from_vllm_which_books_whole_prompts():
    assert not [name for name in names_that_grow(VLLM) if "iteration_tokens" in name]


@KNOWN
def test_names_that_changed_say_of_which_versions_they_are(source):
    for item in source.translations:
        assert len(item.theirs) == 1 or len(item.versions) == len(item.theirs), item.ours


def test_page_of_foreign_servers_is_that_of_the_sources():
    assert (DOCS / "foreign-servers.md").read_text(encoding="utf-8") == render_markdown(), (
        "run `python -m sojourn.interop.sources.document > docs/foreign-servers.md`"
    )
