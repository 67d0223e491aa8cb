"""What the engine booked as waiting is found again from its records alone, and laid at somebody's door."""

import random

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from sojourn.engine.messages import Abort, Submit
from sojourn.engine.sampling import SamplingParams
from sojourn.metrics.compute.step_costs import StepCosts
from sojourn.metrics.ledger import ACCOUNTS
from sojourn.metrics.records.tables import SCHEMAS, row
from sojourn.metrics.request.blame import UNEXPLAINED, blame_of, matrix, offenders, waited_ns, worst
from sojourn.metrics.request.offenders import Book, open_book
from sojourn.metrics.request.token_gaps import explain_gap
from sojourn.metrics.steps import Steps
from tests.engine.simulated import SHAPE, Simulation

US, MS = 1_000, 1_000_000
POLICIES = ("fcfs", "priority", "shortest-prefill-first", "fair-share", "static", "prefill-first")


def busy(
    seed: int, *, turns: int = 120, aborts: bool = True, stalls: dict[int, int] | None = None, **settings
) -> tuple[Simulation, dict[str, Submit]]:
    """A simulated engine that had more to do than it could, with requests that come at any moment of a step."""
    rng = random.Random(seed)
    settings = {"num_blocks": 24, "max_num_seqs": 4, "max_num_batched_tokens": 12, **settings}
    simulation, submitted = Simulation(**settings), {}
    simulation.steps.stalls = stalls or {}
    began_ns = 0
    for _ in range(turns):
        messages = []
        for _ in range(rng.choice((0, 0, 1, 2))):
            name = f"r{len(submitted)}"
            long = rng.random() < 0.2
            prompt = [rng.randrange(50) for _ in range(rng.randint(20, 40) if long else rng.randint(1, 8))]
            encoded_ns = rng.randint(began_ns, max(simulation.clock.now_ns, began_ns))
            params = SamplingParams(max_tokens=rng.randint(1, 10), temperature=0.0, ignore_eos=True)
            message = Submit(
                name, prompt, params, encoded_ns=encoded_ns, tenant=rng.choice("ab"), priority=rng.choice((0, 1))
            )
            messages.append(message)
            submitted[name] = message
        if aborts and submitted and rng.random() < 0.05:
            messages.append(Abort(rng.choice(list(submitted))))
        began_ns = simulation.clock.now_ns
        simulation.receive(*messages)
        if simulation.engine.has_work:
            simulation.step()
    simulation.drain()
    return simulation, submitted


def tables(simulation: Simulation, submitted: dict[str, Submit]) -> tuple[pa.Table, pd.DataFrame]:
    """What the records of such a run would be."""
    published = simulation.published
    costs = StepCosts(SHAPE)
    records = list(map(row, costs.complete(Steps(published.records)).records))
    steps = pa.Table.from_pylist(records, schema=SCHEMAS["steps"])
    rows = []
    for name, ended in published.ended.items():
        message = submitted[name]
        rows.append(
            {"request_id": name, "tenant": message.tenant, "klass": "", "arrived_ns": message.encoded_ns,
             "finished_ns": ended.booked_ns, "prompt_tokens": len(message.prompt_token_ids),
             "first_step": ended.first_step, "last_step": ended.last_step, "finish_reason": ended.reason,
             "waits": getattr(ended, "waits", None), "token_ns": token_ns(simulation, name)}
            | {f"ledger_{info.column}": ended.ledger[info.account] for info in ACCOUNTS}
        )  # fmt: skip
    requests = pd.DataFrame(rows).astype({"first_step": "float64", "last_step": "float64"})
    return steps, requests


def token_ns(simulation: Simulation, name: str) -> list[int]:
    return [committed_ns for committed_ns, _ in simulation.published.ledgers.get(name, [])]


def opened(seed: int, **settings) -> Book:
    return open_book(*tables(*busy(seed, **settings)), SHAPE, block_size=4)


def each(book: Book) -> pd.Series:
    return pd.Series(book.requests.request_id.to_numpy(), index=book.requests.request_id)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_rows_of_the_blame_matrix_sum_to_the_waits_of_the_ledger(policy, overlap):
    book = opened(11, policy=policy, overlap=overlap)
    table = matrix(book, each(book))
    waited = waited_ns(book).sum(axis=1)
    assert (waited > MS).sum() > 20
    np.testing.assert_allclose(table.sum(axis=1), waited, atol=1)
    left = table[UNEXPLAINED].abs()
    bound = np.minimum(0.01 * waited, MS) + 20 * US  # and a few readings of a clock that ticks once a microsecond
    aborted = (book.requests.finish_reason == "abort").to_numpy()
    assert (left <= bound)[~aborted].all(), table[left > bound]
    assert (left <= bound).mean() > 0.98  # whom an abort met in the middle of a turn is found within that turn
    assert left.sum() < 0.001 * waited.sum()


def test_every_way_of_waiting_was_tried():
    """Else the matrix above would close for want of trying."""
    tried = set()
    for policy in ("fcfs", "priority", "static"):
        simulation, _ = busy(11, policy=policy, overlap=True)
        tried |= {reason for ended in simulation.published.ended.values() for reason in ended.waits}
        tried |= {"preempted" for record in simulation.published.records if record.preempted_ids}
        tried |= {"recompute" for record in simulation.published.records if "recompute" in record.kinds}
    assert tried >= {"batch_cap", "token_budget", "kv_blocks", "policy", "step", "preempted", "recompute"}


@pytest.fixture(scope="module")
def book() -> Book:
    return opened(12, policy="priority", overlap=True)


def test_columns_and_rows_are_the_same_matrix(book):
    """Three ways to the same numbers: sums along the steps, sums over the offenders, and one request alone."""
    table = matrix(book, each(book)).drop(columns=UNEXPLAINED)
    totals = offenders(book).set_index("request_id").caused_ns
    np.testing.assert_allclose(table.sum()[totals.index], totals, rtol=1e-9, atol=10)
    assert table.sum().drop(totals.index).abs().sum() < 10
    top = worst(book, 3)
    np.testing.assert_allclose(top[top.columns[:3]], table[top.columns[:3]], rtol=1e-9, atol=10)
    for name in table.index[::7]:
        alone = blame_of(book, name).groupby("offender").ns.sum()
        np.testing.assert_allclose(table.loc[name, alone.index], alone, rtol=1e-9, atol=10)
        assert table.loc[name].sum() == pytest.approx(alone.sum(), abs=100)


def test_accounts_of_all_gaps_sum_to_the_ledger(book):
    """A gap is cut out of the chain of a request's life; all gaps together are its life up to the last token."""
    told = 0
    for _, request in book.requests[book.requests.finish_reason == "length"].iterrows():
        gaps = [explain_gap(book, request.request_id, token) for token in range(len(request.token_ns))]
        summed: dict[str, int] = {}
        for gap in gaps:
            assert abs(gap.length_ns - sum(gap.accounts.values())) <= len(gap.accounts)
            for name, ns in gap.accounts.items():
                summed[name] = summed.get(name, 0) + ns
        whole = request.token_ns[-1] - request.arrived_ns
        for info in ACCOUNTS:
            booked = request[f"ledger_{info.column}"]
            assert summed.get(info.name, 0) == pytest.approx(booked, abs=0.01 * whole + 20 * US), (
                request.request_id,
                info,
            )
        told += len(gaps)
    assert told > 200
