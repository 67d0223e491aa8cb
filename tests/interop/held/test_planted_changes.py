"""Slower after an upgrade: three changes of a simulated vLLM, from two files of pages, two logs and two summaries."""

import json
from datetime import UTC, datetime

import msgspec
import pytest
from typer.testing import CliRunner

from sojourn.commands.program import app
from sojourn.interop.held.courses import bounds_of, change_points, courses_of, looks_in
from sojourn.interop.held.differences import differences
from sojourn.interop.held.logs.pages import between
from sojourn.interop.held.registry import read_held
from sojourn.metrics.errors import InputError
from tests.further import further
from tests.interop.held.shapes import vllm
from tests.live.watch.simulated_vllm import Load, SimulatedVllm

SECONDS, EVERY, BEGIN_S = 180, 10, 1_790_000_000
PROMPTS = Load(4.0, prompt_tokens=400, cached=0.9)
BEFORE = {"enable_prefix_caching": True, "max_num_batched_tokens": 8192, "max_num_seqs": 256}
CHANGES = {
    "enable_prefix_caching": (False, SimulatedVllm((Load(4.0, prompt_tokens=400),), seed=2)),
    "max_num_batched_tokens": (64, SimulatedVllm((PROMPTS,), seed=2, budget=16)),
    "max_num_seqs": (2, SimulatedVllm((PROMPTS,), seed=2, cap=2)),
}


def pages_of(server: SimulatedVllm, seconds: int = SECONDS, every: int = EVERY) -> list[tuple[int, bytes]]:
    return [(BEGIN_S + place, page) for place, (_, page) in enumerate(server.pages(seconds)) if place % every == 0]


def file_of(pages, settings=None) -> str:
    labels = ",".join(f'{name}="{value}"' for name, value in (settings or {}).items())
    stated = f"vllm:cache_config_info{{{labels}}} 1.0\n" if settings else ""
    return "".join(f"{second}\n{page.decode()}\n{stated}" for second, page in pages)


def held_of(text: str):
    held = read_held(text, "pages")
    return held, between(held[0], held[-1])


def log_of(held, settings) -> str:
    """What vLLM writes every ten seconds, of the same server."""
    lines = [
        f"INFO 09-22 01:00:00 [utils.py:1] non-default args: {settings}",
        "INFO 09-22 01:00:00 [core.py:1] Initializing a V1 LLM engine (v0.20.0) with config: model='m'",
    ]
    courses = {each.name: each for each in courses_of(looks_in(held))}
    rates, running, waiting = (courses[name].values for name in ("output_tokens_per_s", "running", "waiting"))
    for place, (rate, runs, waits) in enumerate(zip(rates, running, waiting, strict=True)):
        moment = datetime.fromtimestamp(BEGIN_S + place * EVERY, UTC)
        lines.append(
            f"INFO {moment:%m-%d %H:%M:%S} [loggers.py:1] Engine 000: Avg prompt throughput: {rate:.1f} tokens/s, Avg "
            f"generation throughput: {rate:.1f} tokens/s, Running: {runs:.0f} reqs, Waiting: {waits:.0f} reqs, GPU KV "
            "cache usage: 10.0%"
        )
    return "\n".join(lines)


def summary_of(figures) -> str:
    mean = {name: figures.value(name) for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")}
    ended = figures.value("requests", "total")
    return json.dumps(vllm(**{
        "request_rate": 4.0, "max_concurrency": None, "duration": float(SECONDS), "completed": ended,
        "num_prompts": ended, "total_input_tokens": 400 * ended, "total_output_tokens": 40 * ended,
        "request_throughput": ended / SECONDS, "output_throughput": 40 * ended / SECONDS,
        "mean_ttft_ms": mean["ttft_ms"], "median_ttft_ms": mean["ttft_ms"], "p99_ttft_ms": 4 * mean["ttft_ms"],
        "mean_tpot_ms": mean["tpot_ms"], "median_tpot_ms": mean["tpot_ms"], "mean_itl_ms": mean["itl_ms"],
        "mean_e2el_ms": mean["ttft_ms"] + 39 * mean["tpot_ms"], "p99_e2el_ms": 4 * mean["e2e_ms"],
    }))  # fmt: skip


@pytest.fixture(scope="module")
def before():
    pages = pages_of(SimulatedVllm((PROMPTS,), seed=1))
    return pages, held_of(file_of(pages))


@pytest.mark.parametrize("name", ["max_num_seqs", *further("enable_prefix_caching", "max_num_batched_tokens")])
def test_a_planted_change_is_worse_and_named_from_whatever_there_is(before, name):
    value, server = CHANGES[name]
    settings = BEFORE | {name: value}
    pages = pages_of(server)
    first, second = ([*read_held(file_of(of, stated), "pages")] for of, stated in
                     ((before[0], BEFORE), (pages, settings)))  # fmt: skip
    courses = [courses_of(looks_in(each)) for each in (first, second)]
    sides = [msgspec.structs.replace(each[-1], figures=between(each[0], each[-1])) for each in (first, second)]
    of_pages = differences(*sides, bounds_of(*courses))
    assert of_pages.verdict == "worse" and name in of_pages.headline, of_pages.headline
    assert any(each.bounds is not None and each.bounds[0] > 1 for each in of_pages.figures)

    held, figures = held_of(file_of(pages))
    logs = [read_held(log_of(each, stated), "log")[0] for each, stated in ((before[1][0], BEFORE), (held, settings))]
    of_logs = differences(*logs)
    assert name in [each.name for each in of_logs.settings]
    assert of_logs.verdict == "worse" or (of_logs.verdict == "cannot tell" and name in of_logs.headline)

    of_summaries = differences(*(read_held(summary_of(each), "s")[0] for each in (before[1][1], figures)))
    assert of_summaries.verdict == "worse", of_summaries.headline


def test_the_moment_of_a_change_is_told_of_one_file_and_nothing_of_a_steady_server(tmp_path):
    steady, grown = tmp_path / "steady.txt", tmp_path / "grown.txt"
    steady.write_text(file_of(pages_of(SimulatedVllm((Load(2.0, output_tokens=10),), seed=3), 310, 5)))
    loads = (Load(2.0, output_tokens=10), Load(8.0, output_tokens=10, begin_s=150))
    grown.write_text(file_of(pages_of(SimulatedVllm(loads, seed=3), 310, 5)))
    assert not change_points(courses_of(looks_in(read_held(steady.read_text(), "steady"))))
    none = CliRunner().invoke(app, ["compare", str(steady)])
    assert none.exit_code == 0 and "no change point" in none.stdout
    found = CliRunner().invoke(app, ["compare", str(grown), "--json"])
    changes = json.loads(found.stdout)["changes"]
    assert found.exit_code == 1 and {"tpot_ms", "itl_ms"} <= {each["name"] for each in changes}
    by_name = {each["name"]: each for each in changes}
    assert 135 <= by_name["tpot_ms"]["begin_ns"] / 1e9 - BEGIN_S <= 165


def test_two_files_without_anything_in_common_are_refused(tmp_path):
    page, smi = tmp_path / "page.txt", tmp_path / "smi.csv"
    page.write_text(file_of(pages_of(SimulatedVllm((Load(4.0),)), 20)))
    smi.write_text("timestamp, name, utilization.gpu [%]\n2026/11/28 10:00:00.000, NVIDIA H100, 50 %\n")
    found = CliRunner().invoke(app, ["compare", str(page), str(smi)])
    assert isinstance(found.exception, InputError) and "no figure and no setting in common" in str(found.exception)


def test_throughput_that_falls_at_the_same_offered_load_is_worse():
    first, second = (read_held(json.dumps(vllm(**of)), "r")[0] for of in (
        {"request_rate": 2.0}, {"request_rate": 2.0, "duration": 100.0, "request_throughput": 1.0,
                                "output_throughput": 101.0}))  # fmt: skip
    found = differences(first, second)
    assert found.verdict == "worse" and "output_tokens_per_s 202" in found.headline, found.headline
    assert differences(second, first).verdict == "better"
