"""Addresses behind which several processes answer: named, and nothing of them is summed. Processes alone are not."""

import json
from random import Random

import pytest

from sojourn.diagnosis.foreign_server import warnings_of
from sojourn.interop.sources import scrapes
from sojourn.interop.sources.gain import gain_of_run
from sojourn.interop.sources.page import own_rows
from sojourn.interop.sources.translate import names_that_grow
from sojourn.interop.sources.view import observe, timeline
from sojourn.interop.sources.vllm import VLLM
from sojourn.live.watch.observer import Observer
from sojourn.live.watch.prometheus import held_scrapes
from sojourn.live.watch.window import Window
from sojourn.loadgen.run.server_glance import ServerWatch
from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.run.segments import write_segment
from tests.metrics.foreign import OBJECTIVES, S, VllmPage, foreign_run, steady
from tests.metrics.live_pages import serving

MANY = [2, 3, 4, 5, 6, 8, 12]
WANTED = names_that_grow(VLLM)


def rows(done: float, engine: str = "0", started: float | None = None, **more: float) -> list[dict]:
    labels = [("engine", engine), ("model_name", "m")]
    figures = {
        "num_requests_running": 3, "num_requests_waiting": 1, "kv_cache_usage_perc": 0.2,
        "generation_tokens_total": 50 * done, "request_success_total": done, "inter_token_latency_seconds_sum": done,
        "inter_token_latency_seconds_count": 50 * done, **more,
    }  # fmt: skip
    own = [] if started is None else [("process_start_time_seconds", [], started)]
    found = [(f"vllm:{name}", [*labels, ("finished_reason", "stop")] if "success" in name else labels, value)
             for name, value in figures.items()]  # fmt: skip
    return [{"name": name, "labels": own_labels, "value": float(value)} for name, own_labels, value in [*found, *own]]


def recorded(path, pages, every_s=1.0) -> RunDirectory:
    """A run directory with these pages as its scrapes; None for one that failed."""
    run = foreign_run(path, steady(4), VllmPage(), objectives=OBJECTIVES)
    for part in run.sources("scrapes"):
        part.unlink()
    found = []
    for place, page in enumerate(pages):
        ns = int((1_000 + place * every_s) * S)
        found += [{"ns": ns, **row} for row in page or ()] + own_rows(ns, up=page is not None, took_s=0.004)
    write_segment(run.path, "scrapes", found, "0")
    run.compact()
    return run


def in_turn(count: int, order: str, with_start: bool, seconds: int = 61) -> list[list[dict]]:
    random = Random(count)
    first = sorted(random.randrange(10, 100_000) for _ in range(count))
    if order == "falling":
        first.reverse()
    found = []
    for second in range(seconds):
        chosen = random.randrange(count) if order == "random" else second % count
        found.append(rows(first[chosen] + second // count, started=1.0 + chosen if with_start else None))
    return found


def in_window(pages, every_s=1.0) -> Window:
    window = Window(1e6)
    for place, page in enumerate(pages):
        if page is not None:
            window.add(int(place * every_s * S), page)
    return window


@pytest.mark.parametrize("with_start", [True, False], ids=["start times", "counters only"])
@pytest.mark.parametrize("order", ["rising", "falling", "random"])
@pytest.mark.parametrize("count", MANY)
def test_processes_that_answer_in_turn_are_found(count, order, with_start):
    assert in_window(in_turn(count, order, with_start)).alternates


@pytest.mark.parametrize("count", [2, 8])
def test_a_run_s_scrapes_of_them_have_no_sum_no_course_and_a_warning(tmp_path, count):
    run = recorded(tmp_path / "run", in_turn(count, "rising", False))
    requests = run.requests()
    view = observe(run, requests, requests)
    assert scrapes.alternate(run, WANTED) and view.alternates and not view.totals and not view.gauges
    assert timeline(run).empty and gain_of_run(run) is None
    assert any("several processes answered /metrics in turn" in said for said in warnings_of(view, len(requests)))


def test_a_watch_and_the_page_of_a_load_show_no_rate_of_them():
    observer, watch = Observer("x", "x", {}), ServerWatch()
    for second, page in enumerate(in_turn(3, "rising", False, 20)):
        observer.add(second * S, page)
        watch.take([{"ns": second * S, **row} for row in page])
    assert observer.watched().state == "cannot tell" and watch.glance() is None
    assert all(moment.output_tokens_per_s is None for moment in observer.history)


def crashes(every: int, silent: int, seconds: int = 61) -> list[list[dict] | None]:
    """A process that begins anew after so many seconds, and does not answer for some of them."""
    return [None if second % every >= every - silent else rows(10 * (second % every)) for second in range(seconds)]


@pytest.mark.parametrize(
    "pages",
    [
        [rows(second) for second in range(61)],
        [rows(1000 + second if second < 30 else second - 30) for second in range(61)],
        [rows(second if second < 4 else second - 4) for second in range(61)],  # few counts, soon reached again
        crashes(every=15, silent=4),
        crashes(every=6, silent=2),
        [rows(1000 + second, "0") + (rows(second % 20, "1") if second % 20 < 16 else []) for second in range(61)],
        [rows(1000 + second, started=5.0) for second in range(61)],
        [rows(1000 + second if second < 30 else second - 30, started=5.0 + second // 30) for second in range(60)],
    ],
    ids=["steady", "one restart", "early restart", "crash loop", "quick crash loop", "one engine comes and goes",
         "start time", "start time and restart"],
)  # fmt: skip
def test_one_process_is_no_load_balancer(tmp_path, pages):
    assert not in_window(pages).alternates
    assert not scrapes.alternate(recorded(tmp_path / "run", pages), WANTED)


def drawn(seed: int, engines: int) -> list[list[dict] | None]:
    """Pages of engines that restart, vanish, appear late, and lack a value; some scrapes fail."""
    random = Random(seed)
    done = {str(engine): random.randrange(100, 1000) for engine in range(engines)}
    late, found = {name: random.randrange(0, 10) for name in done}, []
    for place in range(30):
        page = []
        for name in done:
            done[name] = 0 if random.random() < 0.03 else done[name] + random.randrange(5)
            if place >= late[name] and random.random() > 0.15:
                more = {"num_preemptions_total": done[name]} if random.random() > 0.1 else {}
                page += rows(done[name] if random.random() > 0.05 else float("nan"), name, **more)
        found.append(page if page and random.random() > 0.1 else None)
    return found


@pytest.mark.parametrize("seed", range(8))
def test_the_table_of_a_run_gives_what_the_window_of_a_watch_gives(tmp_path, seed):
    pages = drawn(seed, 1 + seed % 4)
    first = next(place for place, page in enumerate(pages) if page is not None)
    window, run = in_window(pages), recorded(tmp_path / "run", pages)
    begin = int((1_000 + first) * S)
    names = {"vllm:generation_tokens_total", "vllm:request_success_total", "vllm:num_preemptions_total"}
    end = int((1_000 + len(pages)) * S)
    tables = (window.growth(window.answered[0].ns, names), scrapes.growth(run, names, begin, end))
    live, stored = (
        {(row.name, json.dumps(dict(row.labels), sort_keys=True)): row.growth
         for row in table.itertuples(index=False, name="Row") if row.growth}
        for table in tables
    )  # fmt: skip
    assert live == stored
    course = scrapes.growth_over_time(run, names, begin, end)
    assert course.growth.sum() == pytest.approx(sum(stored.values()))


def test_replicas_behind_a_prometheus_are_one_server_each():
    """Two instances of one job, whose series differ by that label only, and a counter of each that the other lacks."""
    at = [1_700_000_000.0 + 15 * place for place in range(20)]

    def series(instance, name, values, **labels):
        metric = {"__name__": name, "job": "vllm", "instance": instance, "model_name": "m", **labels}
        return {"metric": metric, "values": [[moment, str(value)] for moment, value in zip(at, values, strict=True)]}

    result = []
    for number, instance in enumerate(("a:8000", "b:8000")):
        result += [
            series(instance, "vllm:num_requests_running", [2 + number] * 20),
            series(instance, "vllm:num_requests_waiting", [0] * 20),
            series(instance, "vllm:generation_tokens_total", [(900_000, 100)[number] + 1500 * n for n in range(20)]),
            series(instance, "vllm:request_success_total", [(9_000, 1)[number] + 15 * n for n in range(20)],
                   finished_reason=("stop", "length")[number]),
            series(instance, "process_start_time_seconds", [float(number)] * 20),
        ]  # fmt: skip
    body = json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}}).encode()
    with serving(lambda path: (200, body)) as base:
        held = held_scrapes(base, 300)
    observers = {}
    for scrape in held:
        observers.setdefault(scrape.target, Observer("x", "x", {}, window_s=300.0)).add(scrape.ns, scrape.rows)
    found = {target[1]: observer.watched() for target, observer in observers.items()}
    assert {name: (each.now.running, round(each.now.output_tokens_per_s)) for name, each in found.items()} == {
        "a:8000": (2, 100), "b:8000": (3, 100)}  # fmt: skip
    assert all(each.state == "healthy" and each.restarts == 0 for each in found.values())


def test_a_sticky_balancer_shows_in_what_the_client_counted(tmp_path):
    """Each connection ends at one of two replicas: the page is of one, the load went to both."""
    halves = [life for number, life in enumerate(steady(60)) if number % 2]
    run = foreign_run(tmp_path / "run", halves, VllmPage())
    requests = foreign_run(tmp_path / "load", steady(60), VllmPage()).requests()
    view = observe(run, requests, requests)
    assert not view.alternates
    assert any("counted 30 finished requests and the client 60" in said for said in warnings_of(view, 60))
