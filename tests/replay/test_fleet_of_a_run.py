"""A run of several servers, replayed with another router and with equal servers; measured are fleets of simulated
engines that were placed so."""

import random

import pytest

from sojourn.diagnosis.diagnose import diagnose
from sojourn.metrics.errors import ReplayError
from sojourn.metrics.prediction import Change
from sojourn.metrics.run.directory import RunDirectory
from sojourn.replay.predictor import ReplayPredictor, predictor_of
from sojourn.replay.routing import make_routing
from tests.replay.simulated_fleet import write_fleet
from tests.replay.simulated_run import DEFAULTS, Ask, random_asks

ASKS = random_asks(3, 160, mean_gap_ns=3_000_000)
OBJECTIVES = [{"klass": "all", "ttft_ms": 5.0, "source": "chosen for the test"}]
ROOMY = {"num_blocks": 4096}


def number(ask: Ask) -> int:
    return int(ask.id[1:])


@pytest.fixture(scope="module")
def crowded(tmp_path_factory) -> ReplayPredictor:
    """Seven of eight requests go to server 0; server 1 takes two at a time."""
    path = tmp_path_factory.mktemp("crowded") / "run"
    return predictor_of(write_fleet(path, ASKS, lambda ask: int(number(ask) % 8 == 0), objectives=OBJECTIVES,
                                    own={1: {"max_num_seqs": 2}}, **ROOMY))  # fmt: skip


def measured(path, server_of) -> dict[str, float]:
    """Two equal servers with the requests placed so."""
    return predictor_of(write_fleet(path, ASKS, server_of, objectives=OBJECTIVES, **ROOMY)).recorded


def check_as(predicted, recorded: dict[str, float], within: float) -> None:
    assert predicted.attainment.median == pytest.approx(recorded["attainment"], abs=within)
    for latency in ("ttft_ms", "tpot_ms", "e2e_ms"):
        for label in ("p50", "p90"):
            median = getattr(predicted, latency)[label].median
            assert median == pytest.approx(recorded[f"{latency}:{label}"], rel=within), f"{latency}:{label}"


def test_a_fleet_replayed_unchanged_is_the_fleet(crowded):
    (unchanged,) = crowded.predict([Change()])
    check_as(unchanged, crowded.recorded, 0.01)
    assert 0.5 < crowded.recorded["attainment"] < 0.9 and unchanged.is_trusted


def test_a_diagnosis_prices_another_router_and_equal_servers(crowded):
    first = diagnose(crowded.run, predictor=crowded).findings[0]
    assert first.key == "replica_imbalance" and first.change.routing == "least-requests"
    assert not first.gain_is_estimate and first.goodput_gain > 0.1
    assert "replayed with routing=least-requests" in first.fix.basis


def test_another_router_and_equal_servers_give_what_such_a_fleet_gives(crowded, tmp_path):
    policy = make_routing("consistent-hash", 2, max_num_seqs=DEFAULTS["max_num_seqs"], num_blocks=4096)
    chosen = {ask.id: policy.choose(b"%s#0" % ask.id.encode(), []) for ask in ASKS}
    hashed, least, in_place = crowded.predict([
        Change(routing="consistent-hash", servers="equal"), Change(routing="least-requests", servers="equal"),
        Change(servers="equal"),
    ])  # fmt: skip
    check_as(hashed, measured(tmp_path / "hashed", lambda ask: chosen[ask.id]), 0.08)
    # Where it sends each one nobody knows beforehand; it is about as good as in turn
    check_as(least, measured(tmp_path / "turns", lambda ask: number(ask) % 2), 0.08)
    assert in_place.attainment.median < least.attainment.median - 0.1, "equal servers do not mend the router"


def test_a_router_that_looks_at_prefixes_finds_what_the_other_server_holds(tmp_path):
    dice = random.Random(5)
    talks = [[1000 * session + place for place in range(600)] for session in range(8)]
    lengths, asks = [0] * 8, []
    for at in range(96):  # the turns of eight conversations, one after the other
        lengths[at % 8] += dice.randint(12, 40)
        asks.append(Ask(f"r{at:04d}", at * 9_000_000, talks[at % 8][: lengths[at % 8]], dice.randint(1, 8)))

    def in_turn(ask: Ask) -> int:
        return (number(ask) + number(ask) // 8) % 2

    blind = predictor_of(write_fleet(tmp_path / "blind", asks, in_turn, objectives=OBJECTIVES, **ROOMY))
    unchanged, aware = blind.predict([Change(), Change(routing="prefix-aware")])
    check_as(unchanged, blind.recorded, 0.06)
    sticky = predictor_of(write_fleet(tmp_path / "sticky", asks, lambda ask: number(ask) % 2, objectives=OBJECTIVES,
                                      **ROOMY))  # fmt: skip
    check_as(aware, sticky.recorded, 0.1)
    assert aware.ttft_ms["p50"].median < 0.8 * unchanged.ttft_ms["p50"].median


def test_what_a_replay_of_a_fleet_cannot_make_is_refused(crowded):
    with pytest.raises(ReplayError, match="has 2 servers already"):
        crowded.check(Change(replicas=3))
    one = predictor_of(RunDirectory.open(crowded.run.path / "server-0"))
    with pytest.raises(ReplayError, match="give replicas=2 beside it"):
        one.check(Change(routing="prefix-aware"))
    with pytest.raises(ReplayError, match="this run has one server"):
        one.check(Change(servers="equal"))


def test_a_server_that_shows_no_steps_is_named(tmp_path):
    run = write_fleet(tmp_path / "run", ASKS[:40], lambda ask: int(number(ask) == 0), **ROOMY)
    (run.path / "server-1" / "steps.parquet").unlink()
    with pytest.raises(ReplayError, match="server-1 has 0 step records"):
        predictor_of(run)
