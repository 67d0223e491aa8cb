"""A server that stands, as its clients and its page show together: who stood, what it cost, and what is no stop."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from sojourn.diagnosis.causes.slow_network import outside_floor_ms
from sojourn.diagnosis.diagnose import diagnose
from sojourn.diagnosis.evidence import read_evidence
from sojourn.diagnosis.stop_facts import Stops, stops_of
from sojourn.metrics.records.tables import SCHEMAS
from sojourn.metrics.run.directory import RunDirectory
from tests.metrics.foreign import START_NS, Life, S, VllmPage, foreign_run, steady

Move = Callable[[np.ndarray], np.ndarray]


def standing(every_s: float, for_s: float, first_s: float = 3.0) -> Move:
    """Moments of the plan → when they are in a world that stands `for_s` in each `every_s`: what falls into a stop
    comes at its end."""

    def move(ns: np.ndarray) -> np.ndarray:
        into = (ns - START_NS - first_s * S) % (every_s * S)
        return np.where((ns >= START_NS + first_s * S) & (into < for_s * S), ns + for_s * S - into, ns)

    return move


def run_that(path, lives: list[Life], *, texts: Move | None = None, scrapes: Move | None = None) -> RunDirectory:
    """A run whose texts, and whose scrapes, came later than planned. A page that is late took that long, and shows what
    it would have shown."""
    run = foreign_run(path, lives, VllmPage())
    client, pages = (pd.read_parquet(path / f"{name}.parquet") for name in ("client", "scrapes"))
    if texts is not None:
        for name in ("first_token_ns", "last_byte_ns"):
            client[name] = texts(client[name].to_numpy("float64")).astype("int64")
        client["chunk_ns"] = [list(texts(np.asarray(each, "float64")).astype("int64")) for each in client.chunk_ns]
    if scrapes is not None:
        came = scrapes(pages.ns.to_numpy("float64"))
        late_s = pd.Series((came - pages.ns) / S).where(pages.name == "scrape_duration_seconds", 0.0)
        pages["value"] += late_s
        pages["ns"] = came.astype("int64")
    for name, table in (("client", client), ("scrapes", pages)):
        table.to_parquet(path / f"{name}.parquet", schema=SCHEMAS[name], index=False)
    return run


def frozen(lives: list[Life], move: Move) -> list[Life]:
    """The same requests on an engine that stands: what they do in a stop they do at its end."""
    found = []
    for life in lives:
        first_s, last_s = (float(move(np.array([START_NS + s * S]))[0] - START_NS) / S
                           for s in (life.first_s, life.last_s))  # fmt: skip
        found.append(replace(life, encode_s=life.encode_s + first_s - life.first_s, decode_s=last_s - first_s))
    return found


@pytest.mark.parametrize(("every_s", "for_s", "rate_s"), [(6.0, 2.6, 0.5), (9.0, 4.0, 0.3), (14.0, 7.0, 0.9)])
@pytest.mark.parametrize("stood", ["engine", "front"])
def test_a_server_that_stands_again_and_again_is_named_by_who_stood(tmp_path, stood, every_s, for_s, rate_s):
    move = standing(every_s, for_s)
    lives = steady(int(40 / rate_s), every_s=rate_s)
    if stood == "engine":
        run = run_that(tmp_path / "run", frozen(lives, move), texts=move)
    else:
        run = run_that(tmp_path / "run", lives, texts=move, scrapes=move)
    found = diagnose(run, level="metrics")
    key = {"engine": "engine_stall", "front": "blocked_front"}[stood]
    assert [each.key for each in found.findings if each.role == "cause"] == [key], found.headline
    stops = read_evidence(run, "metrics").stops()
    assert {each.stood for each in stops.found} == {stood} and stops.longest_s == pytest.approx(for_s, abs=0.7)


@pytest.mark.parametrize("lives", [
    steady(60, every_s=0.5),
    steady(12, every_s=5.0),  # idle between two requests
    [replace(life, prefill_s=3.0 if n % 6 == 0 else 0.05, prompt_tokens=6000 if n % 6 == 0 else 100)
     for n, life in enumerate(steady(40, every_s=1.0))],  # long prompts stand before all others
    [replace(life, queue_s=0.4 * n) for n, life in enumerate(steady(40, every_s=0.5))],
    steady(40, every_s=0.5, decode_s=30.0),  # each step takes 1.5 s
    steady(30, every_s=0.7, way_in_s=1.0, way_out_s=1.0),
], ids=["healthy", "idle", "long prompts", "queue", "slow steps", "slow way"])  # fmt: skip
def test_what_work_or_nobody_explains_is_no_stop(tmp_path, lives):
    assert read_evidence(run_that(tmp_path / "run", lives), "metrics").stops().found == ()


def test_without_scrapes_in_a_stop_nobody_knows_who_stood(tmp_path):
    facts = read_evidence(run_that(tmp_path / "run", steady(60, every_s=0.5), texts=standing(6.0, 2.6)), "metrics")
    looks = pd.DataFrame({"begin_ns": [START_NS], "end_ns": [START_NS + S], "generated": [0.0]})
    assert stops_of(facts.rows, looks).found == () == stops_of(facts.rows, looks[:0]).found
    assert Stops(()).longest_s == 0.0


@pytest.mark.parametrize("way_s", [0.3, 0.6, 2.0])
def test_a_way_that_each_request_pays_is_named_and_one_that_some_pay_is_not(tmp_path, way_s):
    long = steady(40, every_s=0.7, way_in_s=way_s, way_out_s=way_s)
    found = diagnose(foreign_run(tmp_path / "long", long, VllmPage()))
    assert [each.key for each in found.findings] == ["slow_network"]
    some = [replace(life, way_in_s=3 * way_s * (n % 3 == 0), way_out_s=0.004) for n, life in enumerate(long)]
    facts = read_evidence(foreign_run(tmp_path / "some", some, VllmPage()))
    assert outside_floor_ms(facts) is None


@pytest.mark.parametrize(("share", "slower", "named"), [(4, 3.0, True), (3, 8.0, True), (1, 8.0, False)])
def test_few_who_read_slowly_are_named_and_a_slow_server_is_not(tmp_path, share, slower, named):
    """One client in `share` reads at a pace of its own; the server makes all tokens alike."""
    lives = steady(60, every_s=0.5)
    run = foreign_run(tmp_path / "run", lives, VllmPage())
    client = pd.read_parquet(tmp_path / "run/client.parquet")
    for at in client.index[::share]:
        first, chunks = client.first_token_ns[at], np.asarray(client.chunk_ns[at])
        client.at[at, "chunk_ns"] = [int(first + slower * (ns - first)) for ns in chunks]
        client.loc[at, "last_byte_ns"] = client.chunk_ns[at][-1]
    client.to_parquet(tmp_path / "run/client.parquet", schema=SCHEMAS["client"], index=False)
    assert ("slow_reader" in [each.key for each in diagnose(run).findings]) == named
    slow = [replace(life, decode_s=slower * 0.4 if n % 3 == 0 else 0.4) for n, life in enumerate(lives)]
    own = diagnose(foreign_run(tmp_path / "own", slow, VllmPage()))
    assert "slow_reader" not in [each.key for each in own.findings]


@pytest.mark.parametrize("lag_s", [0.6, 1.5])
def test_a_client_that_sends_late_is_named_beside_a_page(tmp_path, lag_s):
    lives = [replace(life, lag_s=lag_s if n % 2 else 0.001) for n, life in enumerate(steady(60, every_s=0.5))]
    found = diagnose(foreign_run(tmp_path / "run", lives, VllmPage()))
    assert [each.key for each in found.findings] == ["starved_load_generator"]
