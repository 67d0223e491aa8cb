"""A step in which the device stands still, under the engine's own books: blame closes, and grows with no stall."""

import numpy as np
import pandas as pd
import pytest

from sojourn.metrics.ledger import ACCOUNTS
from sojourn.metrics.request.blame import UNEXPLAINED, matrix, waited_ns
from sojourn.metrics.request.offenders import open_book
from sojourn.metrics.request.stalls import stalled, without_stalls
from sojourn.metrics.request.waits import reasons
from tests.engine.simulated import SHAPE
from tests.engine.telemetry.test_blame import MS, US, busy, tables

STEPS = (70, 95)
SOME = {step: 500 * MS for step in STEPS}
LEDGER = [f"ledger_{info.column}" for info in ACCOUNTS if info.lifecycle != "client"]


def recorded(stalls: dict[int, int], **settings):
    steps, requests = tables(*busy(11, stalls=stalls, **settings))
    return steps, requests, without_stalls(requests, steps, SHAPE)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "static"])
def test_the_books_close_and_blame_is_told_on_a_clock_without_stalls(policy, overlap):
    steps, before, after = recorded(SOME, policy=policy, overlap=overlap)
    at, length = stalled(steps)
    assert len(at) == 2 and (length > 400 * MS).all() and (length <= 500 * MS).all()
    numbers = [table[LEDGER].astype("float64").fillna(0).to_numpy() for table in (before, after)]
    assert (numbers[0].sum(axis=1) == numbers[1].sum(axis=1)).all() and (numbers[1] >= 0).all()
    lost = after.ledger_compute_stall_ns.to_numpy("float64")
    assert (lost > 0).sum() > 5 and (lost <= length.sum() + MS).all()
    told = after.waits.map(lambda cell: sum(reasons(cell).values()))
    assert (told - before.waits.map(lambda cell: sum(reasons(cell).values())) <= 0).all()
    book = open_book(steps, after, SHAPE, block_size=4)
    rows = matrix(book, pd.Series(after.request_id.to_numpy(), index=after.request_id))
    waited = waited_ns(book).sum(axis=1)
    np.testing.assert_allclose(rows.sum(axis=1), waited, atol=1)
    left = rows[UNEXPLAINED].abs()
    assert (left <= np.minimum(0.01 * waited, MS) + 100 * US).mean() > 0.9
    assert left.sum() < 0.02 * waited.sum() + 10 * MS


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_longer_stall_blames_no_request_more(policy):
    caused = []
    for stall_ns in (400 * MS, 4_000 * MS, 40_000 * MS):
        steps, _, after = recorded({STEPS[0]: stall_ns}, policy=policy)
        book = open_book(steps, after, SHAPE, block_size=4)
        rows = matrix(book, pd.Series(after.request_id.to_numpy(), index=after.request_id))
        caused.append(rows.drop(columns=UNEXPLAINED).sum())
    for longer in caused[1:]:
        assert (longer - caused[0].reindex(longer.index).fillna(0)).max() < 20 * MS


def test_ordinary_steps_are_no_stalls():
    steps, before, after = recorded({})
    assert not len(stalled(steps)[0]) and (after.ledger_compute_stall_ns == 0).all()
    assert (before[LEDGER].sum() == after[LEDGER].sum()).all()
