"""What keeping a model warm costs against what its cold starts cost."""

import pytest

from sojourn.engine.server.models.history import History
from sojourn.metrics.memory.residence import GIB, ModelResidence, StateTime, residences_of
from sojourn.ui.tables.memory import residences


def test_both_costs_are_those_of_the_states():
    clock = iter([0, 10e9, 12e9, 112e9, 212e9, 213e9, 313e9])
    history = History("b", "cold", lambda: int(next(clock)))
    assert history.note("loading", 0) and history.note("hot", 3 * GIB) and not history.note("hot", 3 * GIB)
    history.add_wait(2_000_000_000)
    history.add_wait(1_000_000_000)
    assert history.note("sleeping", GIB) and history.note("waking", GIB) and history.note("hot", 3 * GIB)
    residence = history.residence(3 * GIB)
    assert [(each.state, each.count) for each in residence.states] == [
        ("cold", 1), ("loading", 1), ("hot", 2), ("sleeping", 1), ("waking", 1)
    ]  # fmt: skip
    assert (residence.seconds("hot"), residence.seconds("sleeping")) == (200, 100)
    assert residence.held_gib_seconds == 600 + 100 + 1
    assert residence.freed_gib_seconds == 12 * 3 + 100 * 2 + 2
    whole = sum(each.seconds for each in residence.states)
    assert residence.held_gib_seconds + residence.freed_gib_seconds == pytest.approx(3 * whole)
    assert residence.freed_per_second_waited == pytest.approx(238 / 3)
    assert residence.sentence() == (
        "b: hot 200.0 s, sleeping 100.0 s, cold 10.0 s; 1 load of 2.00 s in all, 1 wake of 1.00 s in all; it held "
        "701.0 GiB·s, and freed 238.0 GiB·s; 2 calls waited 3.00 s, 79.3 GiB·s of memory for each second of waiting"
    )


def test_a_front_that_lives_long_remembers_no_more():
    clock = iter(range(0, 10**15, 10**9))
    history = History("b", "cold", lambda: next(clock))
    for _ in range(10_000):
        history.note("hot", GIB)
        history.note("sleeping", 0)
    residence = history.residence(GIB)
    assert len(residence.states) == 3 and residence.count("hot") == residence.count("sleeping") == 10_000
    assert residence.held_gib_seconds == 10_000 and residence.freed_gib_seconds == 10_001


def test_the_app_shows_a_row_a_model():
    states = [StateTime("cold", 1, 1.0, 0.0), StateTime("hot", 1, 2.0, 2.0)]
    table = residences([ModelResidence("b", states, GIB, 2, 4 * 10**9)])
    row = table.iloc[0]
    assert (row["hot (s)"], row["held (GiB·s)"], row["freed (GiB·s)"], row["waited (s)"]) == (2, 2, 1, 4)
    assert row["freed for each second waited (GiB)"] == 0.25


def test_a_model_that_nobody_waited_for_has_no_ratio():
    residence = ModelResidence("a", [StateTime("hot", 1, 1.0, 1.0)], GIB)
    assert residence.freed_per_second_waited is None
    assert residence.sentence() == "a: hot 1.0 s; it held 1.0 GiB·s, and freed 0.0 GiB·s; no call waited"


def test_a_run_of_one_model_or_of_another_version_tells_nothing():
    assert residences_of({}) == residences_of({"models": "b"}) == residences_of({"models": [{"x": 1}]}) == []
