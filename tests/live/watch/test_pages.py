"""What a page of counters can tell: each series by itself, processes that take turns, engines that hang."""

import math
from random import Random

import pytest

from sojourn.interop.sources.names import canonical
from sojourn.live.watch.document import exit_code
from sojourn.live.watch.observer import Observer
from sojourn.live.watch.window import Window

S = 1_000_000_000


def rows(done, engine="0", running=3, waiting=0, prefix="vllm:", **more):
    labels = [("engine", engine), ("model_name", "m")]
    figures = {
        "num_requests_running": running, "num_requests_waiting": waiting, "generation_tokens_total": 50 * done,
        "request_success_total": done, "inter_token_latency_seconds_sum": done,
        "inter_token_latency_seconds_count": 50 * done, **more,
    }  # fmt: skip
    return [
        {"name": prefix + name, "labels": [*labels, ("finished_reason", "stop")] if "success" in name else labels,
         "value": float(value)}
        for name, value in figures.items()
    ]  # fmt: skip


def watched(page, seconds=16, slo=None, every_s=1):
    observer = Observer("x", "x", slo or {}, window_s=60.0)
    for second in range(0, seconds + 1, every_s):
        observer.add(second * S, page(second))
    return observer.watched()


def ended(window):
    return float(window.growth(window.answered[0].ns, ["vllm:request_success_total"]).growth.sum())


@pytest.mark.parametrize("seed", range(30))
def test_growth_is_the_true_increments_of_series_that_restart_vanish_and_lack_a_value(seed):
    random, window, truth = Random(seed), Window(1e6), 0
    shown, now, last = {}, {}, {}
    for engine in "012":
        now[engine] = random.randrange(1000, 500_000)
    for scrape in range(40):
        page = []
        for engine in "012":
            if engine in shown and now[engine] > 900 and random.random() < 0.05:
                now[engine], last[engine] = 0, 0  # what came since the last look is lost
            now[engine] += random.randrange(9)
            chance = random.random()
            if (scrape and chance < 0.2) or (engine == "2" and scrape < 10):
                page += rows(math.nan, engine) if chance < 0.1 and scrape else []
                continue
            page += rows(now[engine], engine)
            if engine in shown:  # an engine that is new is no traffic
                truth += now[engine] - last[engine] if now[engine] >= shown[engine] or not last[engine] else 0
            shown[engine] = last[engine] = now[engine]
        if any("running" in row["name"] for row in page):
            window.add(scrape * S, page)
    assert ended(window) == truth


@pytest.mark.parametrize("started", [True, False])
def test_processes_that_answer_in_turn_are_named_and_not_summed(started):
    def page(second):
        own = [{"name": "process_start_time_seconds", "labels": [], "value": 1.0 + second % 2}] if started else []
        return rows(second + (900_000 if second % 2 else 1000)) + own

    found = watched(page)
    assert found.state == "cannot tell" and "load balancer" in found.headline
    assert found.now.requests_per_s is None and exit_code(found.state) == 3


def test_one_restart_is_no_load_balancer():
    assert "load balancer" not in watched(lambda second: rows(second if second > 8 else 1000 + second)).headline


@pytest.mark.parametrize("waiting", [0, 4])
@pytest.mark.parametrize("other", [False, True], ids=["alone", "beside an engine that works"])
@pytest.mark.parametrize("every_s", [1, 15], ids=["each second", "by a Prometheus"])
def test_an_engine_that_hangs_is_stuck(waiting, other, every_s):
    def page(second):
        works = rows(100 + second, "0") if other else []
        return works + rows(5, "1", waiting=waiting)

    found = watched(page, 16 if every_s == 1 else 60, every_s=every_s)
    assert found.state == "stuck" and exit_code(found.state) == 7 and "py-spy" in found.headline
    assert ("engine 1 has 3 running" in found.headline) == other


def sglang(second, at, counted=True):
    """Two replicas of one front: tokens and ends are counted together, the load and the steps by `dp_rank`."""
    found = []
    for rank, moves in (("0", second), ("1", at)):
        labels = [("dp_rank", rank), ("model_name", "m")]
        figures = {"num_running_reqs": 3, "num_queue_reqs": 0, "token_usage": 0.2 + moves / 1000, "gen_throughput": 90}
        figures |= {"realtime_tokens_total": 90 * moves} if counted else {}
        found += [{"name": f"sglang:{name}", "labels": labels, "value": float(value)}
                  for name, value in figures.items()]  # fmt: skip
    both = {"generation_tokens_total": 90 * second, "prompt_tokens_total": 9 * second, "num_requests_total": second,
            "e2e_request_latency_seconds_sum": second, "e2e_request_latency_seconds_count": second,
            "time_to_first_token_seconds_sum": 0.1 * second, "time_to_first_token_seconds_count": second}  # fmt: skip
    return found + [{"name": f"sglang:{name}", "labels": [("model_name", "m")], "value": float(value)}
                    for name, value in both.items()]  # fmt: skip


@pytest.mark.parametrize("counted, after", [(True, 40), (False, 70)], ids=["counters", "gauges"])
def test_what_engines_count_together_does_not_hide_one_that_hangs(counted, after):
    """Gauges of SGLang may stand still for a time, its counters not."""
    hangs = lambda second: sglang(second + 5, min(second, 20) + 5, counted)  # noqa: E731
    assert watched(hangs, 25).state == "healthy" and watched(hangs, 40).state != "healthy"
    found = watched(hangs, after)
    assert found.state == "stuck" and found.headline.startswith("Stuck: engine 1 has 3 running")
    assert watched(lambda second: sglang(second + 5, second + 5, counted), after).state == "healthy"


def test_each_engine_that_hangs_is_named_and_no_other():
    pages = lambda second: rows(100 + second, "0") + rows(5, "1") + rows(7, "2", running=2, waiting=9)  # noqa: E731
    found = watched(pages, 20)
    assert "engine 1 has 3 running" in found.headline and "engine 2 has 2 running and 9 waiting" in found.headline
    assert "engine 0" not in found.headline


def test_an_engine_that_hangs_and_goes_on_is_no_longer_stuck():
    pages = lambda second: rows(100 + second) if second < 20 or second >= 40 else rows(120)  # noqa: E731
    assert watched(pages, 38).state == "stuck" and watched(pages, 130).state == "healthy"
    after = watched(pages, 45)
    assert after.state == "degraded" and "stood still for 20 s" in after.headline


def test_a_page_with_no_sign_of_progress_is_not_called_stuck():
    gauges = lambda _: [row for row in rows(5) if "num_requests" in row["name"]]  # noqa: E731
    assert watched(gauges, 90).state == "cannot tell"


def test_a_long_answer_that_makes_tokens_and_an_idle_server_are_not_stuck():
    assert watched(lambda second: rows(5, generation_tokens_total=second)).state == "healthy"
    assert watched(lambda _: rows(5, running=0)).state == "idle"


def test_a_first_prompt_may_take_longer_than_ten_seconds():
    first = watched(lambda _: rows(0))
    assert first.state == "cannot tell" and "long prefill, or a hang" in first.headline
    assert watched(lambda _: rows(0), 70).state == "stuck"


def test_a_server_with_long_prefills_has_a_longer_limit():
    long = {"request_prefill_time_seconds_sum": 15, "request_prefill_time_seconds_count": 5}
    assert watched(lambda _: rows(5, **long)).state == "cannot tell"
    assert watched(lambda _: rows(5, **long), 40).state == "stuck"


def test_an_objective_that_no_metric_shows_is_never_healthy():
    found = watched(lambda second: rows(second), slo={"tpot_ms": 50.0})
    assert found.state == "cannot tell" and any("tpot" in each for each in found.unknown)


@pytest.mark.parametrize("name", ["ray_vllm:prompt_tokens", "ray_vllm_prompt_tokens_total", "vllm_prompt_tokens",
                                  "vllm:prompt_tokens_total"])  # fmt: skip
def test_prefixes_and_suffixes_are_one_name(name):
    assert canonical(name) == "vllm:prompt_tokens_total"
    assert canonical(name.replace("vllm", "sglang")) == "sglang:prompt_tokens_total"


def test_ray_s_page_is_read_and_a_router_s_is_named():
    assert watched(lambda second: rows(second, prefix="ray_vllm_")).now.output_tokens_per_s == pytest.approx(50)
    assert "router" in watched(lambda second: rows(second, avg_ttft=1.0)).headline


@pytest.mark.parametrize(("met", "state"), [(18, "cannot tell"), (95, "healthy")])
def test_objectives_that_the_server_itself_counts_as_missed_are_never_healthy(met, state):
    def page(second):
        figures = {
            ("sojourn_request_running", ()): 2, ("sojourn_request_waiting", ()): 0,
            ("sojourn_token_generated_tokens_total", ()): 1000 * second,
            ("sojourn_request_finished_total", (("outcome", "stop"),)): 10 * second,
        }  # fmt: skip
        for outcome, share in (("met", met), ("missed", 100 - met)):
            labels = (("klass", "chat"), ("objective", "all_objectives"), ("outcome", outcome))
            figures["sojourn_request_objective_total", labels] = share * second / 10
        return [
            {"name": name, "labels": list(labels), "value": float(value)} for (name, labels), value in figures.items()
        ]

    found = watched(page, 30)
    assert found.state == state, found.headline
    assert state == "healthy" or "82% miss all objectives" in found.headline
