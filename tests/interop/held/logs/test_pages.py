"""A saved page gives means since the start; two give what lies between them; a cut number gives nothing."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from sojourn.commands.program import app
from sojourn.interop.held.logs.pages import between, is_same_server
from sojourn.interop.held.registry import read_held
from sojourn.metrics.errors import InputError


def page(requests, ttft_s, tokens, prefix="vllm:", engines=1, started=1000.0, cache="True", waiting=0):
    lines = [f"# TYPE {prefix}generation_tokens_total counter"]
    for engine in range(engines):
        labels = f'engine="{engine}",model_name="m"'
        lines += [
            f'{prefix}generation_tokens_total{{{labels}}} {tokens}',
            f'{prefix}num_requests_running{{{labels}}} 2', f'{prefix}num_requests_waiting{{{labels}}} {waiting}',
            f'{prefix}time_to_first_token_seconds_sum{{{labels}}} {ttft_s}',
            f'{prefix}time_to_first_token_seconds_count{{{labels}}} {requests}',
            f'{prefix}request_success_total{{{labels},finished_reason="length"}} {requests}',
            f'{prefix}prefix_cache_queries_total{{{labels}}} {10 * requests}',
            f'{prefix}prefix_cache_hits_total{{{labels}}} {4 * requests}',
            f'{prefix}cache_config_info{{{labels},enable_prefix_caching="{cache}",num_gpu_blocks="512"}} 1',
        ]  # fmt: skip
    return "\n".join([*lines, f"process_start_time_seconds {started}"]) + "\n"


def read(text, name="m.prom"):
    return read_held(text, name)


@pytest.mark.parametrize("prefix", ["vllm:", "ray_vllm_", "ray_vllm:"])
def test_one_page_says_means_since_the_start_and_what_it_cannot_say(prefix):
    (held,) = read(page(10, 5.0, 400, prefix=prefix))
    assert held.server == "vllm" and held.settings["enable_prefix_caching"] is True
    assert held.settings["num_gpu_blocks"] == 512 and held.settings["model_name"] == "m"
    assert held.figures.value("ttft_ms") == pytest.approx(500)
    assert held.figures.value("requests", "total") == 10 and held.figures.value("hit_rate") == pytest.approx(0.4)
    assert "take a second one" in held.missing[0]


def test_two_pages_in_one_file_say_what_lies_between_them():
    first, second = read(f"2026-11-28T16:00:00Z\n{page(10, 5.0, 400)}1795881660\n{page(30, 45.0, 1200)}")
    assert [each.series[0]["ns"] for each in (first, second)] == [1795881600 * 10**9, 1795881660 * 10**9]
    figures = between(first, second)
    assert figures.value("ttft_ms") == pytest.approx(2000) and figures.value("requests", "total") == 20


def test_pages_of_two_servers_have_no_difference():
    (first,), (second,) = read(page(10, 5.0, 400)), read(page(30, 45.0, 1200, started=2000.0))
    assert not is_same_server(first, second) and between(first, second) is None


def test_engines_are_added_and_counted():
    (held,) = read(page(10, 5.0, 400, engines=3))
    assert held.figures.value("generated_tokens", "total") == 1200 and "3 engines" in held.notes[0]


def test_a_number_that_may_be_cut_is_left_out():
    (held,) = read(page(10, 5.0, 400, started=1234.0).removesuffix("34.0\n"))
    assert not any(row["name"] == "process_start_time_seconds" for row in held.series)
    assert any("may be cut off" in note for note in held.notes)


def test_a_page_of_a_process_alone_and_of_an_unknown_server_say_so():
    text = "# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds 1\nprocess_open_fds 3\n"
    (held,) = read(text)
    assert held.figures is None and "only families of its process" in held.missing[0]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2000), st.integers(0, 2000), st.sampled_from(["", "> ", "vllm-1  | "]))
def test_a_damaged_page_has_only_values_that_were_on_it(begin, length, prefix):
    whole = page(10, 5.0, 400, engines=2)
    values = {float(line.rpartition(" ")[2]) for line in whole.splitlines() if not line.startswith("#")}
    damaged = "\n".join(prefix + line for line in (whole[:begin] + whole[begin + length :]).split("\n"))
    try:
        found = read(damaged)
    except InputError:
        return
    cut = whole[:begin].rpartition("\n")[2] + whole[begin + length :].partition("\n")[0]
    for held in found:
        odd = [row for row in held.series if row["name"] != "up" and row["value"] not in values]
        assert len(odd) <= 1 and all(row["name"] in cut for row in odd)  # the one line that joins two halves


def test_two_pages_in_the_wrong_order_have_no_difference():
    first, second = (read(page(*figures))[0] for figures in ((10, 5.0, 400), (30, 45.0, 1200)))
    assert between(first, second) is not None and between(second, first) is None


def test_a_gauge_without_a_value_is_no_figure():
    (held,) = read(page(10, 5.0, 400).replace("num_requests_running{engine=\"0\",model_name=\"m\"} 2",
                                              "num_requests_running{engine=\"0\",model_name=\"m\"} NaN"))  # fmt: skip
    assert held.figures.value("running", "last") is None and held.figures.value("waiting", "last") == 0


def test_a_later_page_of_one_process_is_compared_by_what_came_since(tmp_path):
    pages = {"a": (100, 50.0, 4000), "b": (300, 450.0, 12000)}
    a, b = (tmp_path / f"{name}.prom" for name in pages)
    for file, figures in zip((a, b), pages.values(), strict=True):
        file.write_text(page(*figures))
    found = json.loads(CliRunner().invoke(app, ["compare", str(a), str(b), "--json"]).stdout)
    ttft = next(each for each in found["figures"] if each["name"] == "ttft_ms")
    assert (ttft["before"], ttft["after"]) == (500.0, 2000.0)
