"""Summaries of other tools: each figure in our terms, under its statistic, in its unit, or refused."""

import json

import pytest
import yaml

from sojourn.interop.held.registry import read_held
from sojourn.metrics.errors import InputError
from tests.interop.held.more_shapes import OLLAMA, PRINTED
from tests.interop.held.shapes import SHAPES, aiperf, guidellm, inferencex, llmd, vllm


@pytest.mark.parametrize(("text", "wanted"), SHAPES.values(), ids=SHAPES)
def test_a_figure_has_its_unit_and_statistic(text, wanted):
    for held in read_held(text, "file"):
        assert {key: held.figures.value(*key) for key in wanted} == pytest.approx(wanted)
        assert all(figure.clock for figure in held.figures.figures)


def test_yaml_says_the_same_as_json():
    by_yaml, by_json = (
        read_held(text, "file") for text in (yaml.safe_dump(guidellm(), sort_keys=False), json.dumps(guidellm()))
    )
    assert by_yaml == by_json


def test_time_per_token_of_guidellm_is_not_taken_for_tpot():
    """GuideLLM has the first token in what it calls TPOT; before 0.4 it meant something else."""
    assert read_held(json.dumps(guidellm()), "file")[0].figures.value("tpot_ms") == 20.0
    old = guidellm() | {"metadata": {"guidellm_version": "0.3.1"}}
    assert read_held(json.dumps(old), "file")[0].figures.value("e2e_per_token_ms") is None


@pytest.mark.parametrize(
    "changed",
    [
        vllm(mean_e2el_ms=2.2, p99_e2el_ms=3.0), vllm(mean_tpot_ms=0.02), vllm(mean_ttft_ms=2e5),
        vllm(duration=50_000.0), vllm(mean_ttft_ms=0.2, mean_tpot_ms=0.02, mean_e2el_ms=2.2), vllm(mean_ttft_ms=-1.0),
        {name: value for name, value in inferencex().items() if "intvty" not in name},
        inferencex() | {"median_intvty": 0.05}, aiperf() | {"time_to_first_token": {"unit": "parsecs", "avg": 1}},
        aiperf() | {"request_latency": {"unit": "ms", "avg": 2.2}},
        json.loads(json.dumps(llmd()).replace('"s/token"', '"fortnights"')),
    ],
)  # fmt: skip
def test_a_unit_that_the_file_contradicts_is_refused(changed):
    with pytest.raises(InputError):
        read_held(json.dumps(changed), "file")


def test_a_tpot_by_chunks_is_noted():
    """Old inference-perf divides by the number of chunks, which may be twice that of the tokens."""
    assert any("TPOT" in note for note in read_held(json.dumps(vllm(mean_tpot_ms=10.0)), "file")[0].notes)


def test_one_text_may_hold_two_results():
    latency, throughput = read_held(PRINTED, "file")
    assert latency.figures.value("e2e_ms", "p99") == 3000.0
    assert throughput.figures.value("output_tokens_per_s", "rate") == 202.0


def test_rates_alone_are_an_answer_each():
    (held,) = read_held("prompt eval rate: 100.00 tokens/s\neval rate: 50.00 tokens/s\n" * 3, "file")
    assert held.figures.value("succeeded", "total") == 3.0


def test_a_model_that_was_loaded_is_no_slow_server():
    (held,) = read_held(json.dumps(OLLAMA | {"load_duration": 1_500_000_000}), "file")
    assert any("waited for the model to be loaded" in note for note in held.notes)


def test_what_the_tool_cancelled_itself_is_no_failure():
    cut = {"error_details": {"type": "RequestCancellationError"}, "count": 11}
    document = aiperf() | {"error_request_count": {"unit": "requests", "avg": 12}, "error_summary": [cut]}
    (held,) = read_held(json.dumps(document), "file")
    assert held.figures.value("failed", "total") == 1.0


@pytest.mark.parametrize(("text", "wanted"), SHAPES.values(), ids=SHAPES)
def test_a_cut_file_is_read_or_refused(text, wanted):
    for length in range(0, len(text), max(1, len(text) // 40)):
        try:
            found = read_held(text[:length], "file")
        except InputError:
            continue
        for held in found:
            for figure in held.figures.figures if held.figures else ():
                whole = wanted.get((figure.name, figure.statistic))
                # A number itself may be cut: then it is smaller by a power of ten, and only where the form allows it.
                assert whole is None or figure.value == pytest.approx(whole) or text[length - 1].isdigit()
