"""What changed between two logs or two pages: settings, means, and which change explains which mean."""

import json

import msgspec
import numpy as np
import pytest

from sojourn.interop.held.differences import differences
from sojourn.interop.held.held import BenchmarkFigures, Figure, Held
from sojourn.interop.held.registry import read_held
from tests.interop.held.shapes import sglang, vllm
from tests.metrics.compare.test_pairs import correlated

UNITS = {"hit_rate": "share", "waiting": "requests", "running": "requests", "prompt_tokens": "tokens"}


def held(settings, kind="page of /metrics", version=None, requests=100, **means):
    figures = [Figure(name=name, statistic="mean", value=value, unit=UNITS.get(name, "ms"), clock="server")
               for name, value in means.items()]  # fmt: skip
    if requests:
        figures.append(Figure(name="requests", statistic="total", value=requests, unit="requests", clock="server"))
    return Held(kind=kind, name="file", server="vllm", version=version, settings=settings,
                figures=BenchmarkFigures(tool=kind, figures=figures))  # fmt: skip


ON, OFF = {"enable_prefix_caching": True}, {"enable_prefix_caching": False}


def test_a_cache_that_went_off_explains_longer_prefills():
    found = differences(held(ON, ttft_ms=76, prefill_ms=60, hit_rate=0.9), held(OFF, ttft_ms=424, prefill_ms=400))
    assert found.verdict == "worse" and "enable_prefix_caching: on → off" in found.headline
    assert "prefill 60 ms → 400 ms" in found.explained[0]


@pytest.mark.parametrize(("before", "after", "means", "words"), [
    ({"max_num_seqs": 64}, {"max_num_seqs": 2}, ({"queue_ms": 1, "ttft_ms": 50}, {"queue_ms": 900, "ttft_ms": 950}),
     "caps how many"),
    ({"max_num_batched_tokens": 8192}, {"max_num_batched_tokens": 512},
     ({"prefill_ms": 100, "ttft_ms": 100}, {"prefill_ms": 300, "ttft_ms": 300}), "prompt tokens a step computes"),
])  # fmt: skip
def test_a_setting_explains_what_it_is_known_to_move(before, after, means, words):
    found = differences(held(before, **means[0]), held(after, **means[1]))
    assert found.verdict == "worse" and words in found.explained[0]


def test_a_mean_that_moved_the_other_way_is_not_explained():
    found = differences(held(ON, ttft_ms=424, prefill_ms=400), held(OFF, ttft_ms=76, prefill_ms=60))
    assert found.verdict == "better" and found.explained == []


def test_a_flag_that_a_log_no_longer_lists_has_its_default():
    before = held({"model": "m"}, "vLLM log", requests=0, waiting=0.0, running=4.0)
    after = held({"model": "m", "max_num_seqs": 2}, "vLLM log", requests=0, waiting=90.0, running=2.0)
    found = differences(before, after)
    assert found.verdict == "worse" and "max_num_seqs: default → 2" in found.headline


def test_a_page_that_lacks_a_setting_says_nothing_of_it():
    assert differences(held(ON, ttft_ms=50), held({}, ttft_ms=50)).settings == []


def test_few_requests_and_equal_means_are_no_verdict():
    assert differences(held(ON, ttft_ms=50, requests=5), held(OFF, ttft_ms=500, requests=5)).verdict == "cannot tell"
    same = differences(held(ON, version="0.18.0", ttft_ms=50), held(ON, version="0.24.0", ttft_ms=52))
    assert same.verdict == "no clear change" and same.settings[0].name == "version"


def test_other_prompts_are_another_load():
    found = differences(held(ON, ttft_ms=50, prompt_tokens=100), held(ON, ttft_ms=500, prompt_tokens=1000))
    assert "the loads differ: prompt_tokens 100 tokens → 1,000 tokens" in found.notes[0]
    assert found.verdict == "cannot tell"


@pytest.mark.parametrize(("before", "after", "reason"), [
    ({"ttft_ms": 9000, "tpot_ms": 10}, {"ttft_ms": 84, "tpot_ms": 13}, "ttft fell, while tpot rose"),
    ({"ttft_ms": 50, "prompt_tokens": 100}, {"ttft_ms": 50, "prompt_tokens": 900}, "the loads differ"),
    ({"ttft_ms": 50, "requests": 5}, {"ttft_ms": 500}, "fewer than 30 requests"),
    ({"kv_use": 50}, {"kv_use": 50}, "no latency is in both"),
])  # fmt: skip
def test_no_verdict_has_a_reason(before, after, reason):
    found = differences(held({}, **before), held({}, **after))
    assert found.verdict == "cannot tell" and reason in found.headline


def test_the_running_hit_rate_of_a_log_is_not_that_of_a_page():
    log, page = held({}, "vLLM log", hit_rate=0.1), held({}, hit_rate=0.3)
    figures = [msgspec.structs.replace(each, clock="vLLM's log") for each in log.figures.figures]
    log = msgspec.structs.replace(log, figures=msgspec.structs.replace(log.figures, figures=figures))
    assert "hit_rate" not in [each.name for each in differences(log, page).figures]
    assert "hit_rate" in [each.name for each in differences(log, log).figures]


def test_hits_that_fell_without_a_change_are_said():
    found = differences(held(ON, ttft_ms=50, hit_rate=0.8), held(ON, ttft_ms=80, hit_rate=0.1))
    assert "hits less, with no change of its setting" in found.explained[-1]


def test_two_tools_on_one_server_are_told_apart_by_their_definitions():
    """The server counts from its queue on, the client from the send: what lies between is no change."""
    client, server = read_held(json.dumps(vllm()), "a")[0], held({}, ttft_ms=100.0)
    found = differences(client, server)
    assert found.verdict == "cannot tell" and any("ttft_ms is defined otherwise" in note for note in found.notes)
    sides = [held({}, ttft_ms=100.0, tpot_ms=20.0) for _ in range(2)]
    figures = [msgspec.structs.replace(each, clock="server: between two pages") for each in sides[1].figures.figures]
    later = msgspec.structs.replace(sides[1], figures=msgspec.structs.replace(sides[1].figures, figures=figures))
    (note,) = (each for each in differences(sides[0], later).notes if "defined otherwise" in each)
    assert note.startswith("ttft_ms, tpot_ms, requests are defined otherwise")
    same = differences(client, read_held(json.dumps(sglang()), "b")[0])
    assert same.verdict == "no clear change"
    other = differences(client, read_held(json.dumps(vllm(max_concurrency=6, mean_ttft_ms=500.0)), "b")[0])
    assert other.verdict == "cannot tell" and any("max_concurrency 5 → 6" in note for note in other.notes)


def test_a_line_of_less_than_a_request_is_none():
    before, after = (held({}, "vLLM log", requests=0, waiting=waiting) for waiting in (0.02, 0.05))
    assert differences(before, after).verdict == "cannot tell"


def test_totals_are_judged_by_the_requests_that_ended():
    pools = [{"num_gpu_blocks": blocks} for blocks in (1000, 500)]

    def side(settings, requests, preemptions):
        found = held(settings, requests=requests, queue_ms=5.0)
        more = Figure(name="preemptions", statistic="total", value=preemptions, unit="requests", clock="server")
        return msgspec.structs.replace(found, figures=BenchmarkFigures(tool="", figures=[*found.figures.figures, more]))

    assert differences(side(pools[0], 100, 10), side(pools[1], 1000, 100)).explained == []  # ten times as long
    assert "preemptions" in differences(side(pools[0], 100, 10), side(pools[1], 100, 60)).explained[0]


def test_quicker_answers_beside_more_failures_are_not_better():
    """What fails at once takes nobody's time."""
    whole, half = (read_held(json.dumps(vllm(**counts)), "r")[0] for counts in (
        {}, {"completed": 40, "failed": 60, "request_throughput": 0.8, "total_output_tokens": 4_040,
             "output_throughput": 80.8, "mean_ttft_ms": 150.0}))  # fmt: skip
    found = differences(whole, half)
    assert found.verdict == "worse" and "failed 0.0% → 60.0%" in found.headline
    assert differences(half, whole).verdict == "cannot tell"


def test_a_line_in_a_few_moments_of_a_log_is_no_verdict():
    line = ("INFO 11-28 10:{:02d}:00 [loggers.py:1] Engine 000: Avg prompt throughput: 1.0 tokens/s, Avg generation "
            "throughput: 9.0 tokens/s, Running: 4 reqs, Waiting: {} reqs, GPU KV cache usage: 10.0%")  # fmt: skip
    long, few, line_of_many = (
        read_held("\n".join(line.format(minute, waiting) for minute in range(count)), "log")[0]
        for count, waiting in ((20, 0), (2, 9), (20, 9))
    )
    assert differences(long, few).verdict == "cannot tell"
    assert differences(long, line_of_many).verdict == "worse"


def test_a_median_is_named_beside_its_mean():
    def of(mean: float, median: float) -> Held:
        kinds = {"mean": mean, "median": median}
        figures = [Figure(name="ttft_ms", statistic=kind, value=value, unit="ms", clock="server")
                   for kind, value in kinds.items()]  # fmt: skip
        count = Figure(name="requests", statistic="total", value=90, unit="requests", clock="server")
        return Held(kind="file", name="file", figures=BenchmarkFigures(tool="file", figures=[*figures, count]))

    found = differences(of(50, 40), of(90, 80))
    assert "ttft 50 ms → 90 ms" in found.headline and "ttft median 40 ms → 80 ms" in found.headline


def halves(seed: int, count: int, slower: float = 1.0):
    """Two summaries of one load, whose requests share a queue: neighbours' latencies correlate by 0.6."""
    random, found = np.random.default_rng(seed), []
    for scale in (1.0, slower):
        ttft_ms = scale * 100 * np.exp(0.8 * correlated(random, count, 0.6))
        e2e_ms = ttft_ms + scale * 900 * np.exp(0.4 * correlated(random, count, 0.6))
        found.append(held(ON, ttft_ms=ttft_ms.mean(), e2e_ms=e2e_ms.mean(), requests=count))
        stds = [Figure(name=name, statistic="std", value=float(each.std()), unit="ms", clock="server")
                for name, each in (("ttft_ms", ttft_ms), ("e2e_ms", e2e_ms))]  # fmt: skip
        figures = msgspec.structs.replace(found[-1].figures, figures=[*found[-1].figures.figures, *stds])
        found[-1] = msgspec.structs.replace(found[-1], figures=figures) if seed % 2 else found[-1]
    return found


@pytest.mark.parametrize("count", [40, 120, 400])
def test_two_halves_of_one_load_differ_by_chance(count):
    """With the spread that a file states, and without."""
    verdicts = [differences(*halves(seed, count)).verdict for seed in range(200)]
    assert sum(each in ("worse", "better") for each in verdicts) <= 10
    assert count < 400 or [differences(*halves(seed, count, 1.6)).verdict for seed in range(20)].count("worse") >= 19


@pytest.mark.parametrize("ttft_ms", [80, 90, 130])
def test_an_answer_that_takes_three_times_as_long_is_worse_whatever_the_first_token_may_do(ttft_ms):
    one, two = (held(ON, ttft_ms=ttft, e2e_ms=e2e, requests=300) for ttft, e2e in ((100, 1000), (ttft_ms, 3000)))
    assert differences(one, two).verdict == "worse"


def test_a_change_that_may_be_chance_says_how_many_more_requests_would_show_it():
    found = differences(held(ON, ttft_ms=100, requests=60), held(ON, ttft_ms=130, requests=60))
    assert found.verdict == "cannot tell"
    assert found.headline.endswith(
        "ttft 100 ms → 130 ms may be chance; about 11.2 times as many requests would show it"
    )
