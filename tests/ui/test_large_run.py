"""A run too large to be held whole: a sample that has the shares of the run, and what a sample would miss."""

import sys

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from bench.ui.long_run import long_run
from sojourn.ui import large_run
from sojourn.ui.filters import RunFilter
from sojourn.ui.launch import APP
from sojourn.ui.markup.incident.section import moving_parts
from sojourn.ui.narrowed import narrowed
from sojourn.ui.run_data import load
from sojourn.ui.tables.request import account_shares, chosen, longest_steps


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The same run, held whole and as a sample."""
    folder = tmp_path_factory.mktemp("large")
    path = long_run(folder / "long", 1_200).path
    whole = load(path)
    patch = pytest.MonkeyPatch()
    for name, value in {
        "MOST_REQUESTS": 500, "MOST_STEPS": 500, "SAMPLED_REQUESTS": 400, "SAMPLED_STEPS": 400, "EXTREMES": 30,
    }.items():  # fmt: skip
        patch.setattr(large_run, name, value)
    yield whole, load(path)
    patch.undo()


def test_sample_stands_for_the_run(pair):
    whole, sample = pair
    count = len(whole.requests)
    assert (len(sample.requests), sample.sampled_of, sample.num_requests) == (400, count, count)
    assert sample.count_steps() == len(whole.steps) and 350 <= len(sample.steps) <= 450
    assert set(sample.requests.request_id) < set(whole.requests.request_id)
    every, some = (account_shares(run.requests).loc["all requests"] for run in (whole, sample))
    named = [name for name in every.index if "." in name]
    assert np.abs(every[named] - some[named]).max() < 0.05
    assert sample.diagnosis == whole.diagnosis and sample.begin_ns == whole.begin_ns


@pytest.mark.parametrize("order", ["e2e_ms", "ttft_ms", "due_ns"])
def test_first_requests_of_an_order_are_those_of_the_whole_run(pair, order):
    whole, sample = pair
    assert sample.ordered(order, 20).request_id.tolist() == chosen(whole.requests, order, 20).request_id.tolist()


def test_any_request_is_found_with_all_its_steps(pair):
    whole, sample = pair
    absent = next(name for name in whole.requests.request_id if name not in set(sample.requests.request_id))
    mine, other = sample.request(absent), whole.request(absent)
    assert mine.e2e_ms == other.e2e_ms and list(mine.token_ns) == list(other.token_ns)
    assert sample.steps_of(mine).step.tolist() == whole.steps_of(other).step.tolist()
    assert sample.request("nobody") is None


def test_longest_steps_are_those_of_the_whole_run(pair):
    whole, sample = pair
    mine, other = (longest_steps(run.steps, run.begin_ns).step.tolist() for run in (sample, whole))
    assert mine == other


def test_filter_narrows_the_sample(pair):
    _, sample = pair
    part = narrowed(sample, RunFilter(klasses=("document",)))
    assert set(part.requests.klass) == {"document"} and set(part.ordered("e2e_ms", 20).klass) == {"document"}
    assert 0 < part.num_requests < sample.num_requests


def test_incident_file_of_a_large_run_names_the_app(pair, monkeypatch):
    monkeypatch.setattr("sojourn.ui.markup.incident.section.MOST_REQUESTS", 500)
    assert "sojourn ui" in moving_parts(pair[1]) and "sojourn-run" not in moving_parts(pair[1])


@pytest.mark.parametrize("page", ["overview", "diagnose", "requests", "steps", "memory", "compute", "goodput"])
def test_page_says_that_it_shows_a_sample(pair, page, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["app.py", "--runs", str(pair[0].path.parent)])
    app = AppTest.from_file(APP, default_timeout=60)
    app.switch_page(f"views/{page}.py").run()
    assert not app.exception and not app.error
    assert "Figures are of a sample of 400 of them" in " ".join(element.value for element in app.info)
