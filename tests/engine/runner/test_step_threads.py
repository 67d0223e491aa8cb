"""How many threads a CPU's step takes."""

import itertools

import pytest
import torch

from sojourn.engine.runner.stream import FEW_ROWS, WORTH, StepThreads, measured_threads
from tests.engine.harness import drain, hand_over, make_engine, submit


@pytest.fixture(autouse=True)
def threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def measured(one_thread_takes: float) -> StepThreads:
    """Of a machine on which one thread takes so many times as long as three."""
    now = itertools.count()

    def clock() -> int:
        turn = next(now)
        seen.append(torch.get_num_threads())
        return turn // 2 * 10**9 + (turn % 2) * round(1e6 * (one_thread_takes if torch.get_num_threads() == 1 else 1))

    seen: list[int] = []
    found = measured_threads([lambda x: x], [8], kv_tokens=100, most=3, clock=clock)
    assert set(seen) == {1, 3} and torch.get_num_threads() == 3
    return found


def test_one_thread_computes_few_tokens_where_more_would_gain_little():
    assert measured(WORTH - 0.05) == StepThreads(3, FEW_ROWS[-1], 100)
    assert measured(WORTH + 0.05) == StepThreads(3, 0, 100)


def test_what_is_measured_is_left_alone_where_there_is_one_thread():
    assert measured_threads([], [], 100, most=1) == StepThreads(1)


@pytest.mark.parametrize(("num_tokens", "seen_tokens", "threads"), [(1, 100, 1), (4, 100, 1), (5, 100, 3), (4, 101, 3)])
def test_more_tokens_or_a_long_context_take_all_threads(num_tokens, seen_tokens, threads):
    rule = StepThreads(3, 4, 100)
    for before in (1, 3):
        torch.set_num_threads(before)
        rule.take(num_tokens, seen_tokens)
        assert torch.get_num_threads() == threads


def test_the_number_of_threads_changes_no_logprob(checkpoints):
    told = []
    for rule in (StepThreads(1), StepThreads(2), StepThreads(2, 4, 10_000)):
        engine, published = make_engine(checkpoints["qwen3"], threads=2)
        engine.runner.threads = rule
        hand_over(engine, [submit(f"r{i}", [5 + i] * 40, 8, logprobs=1) for i in range(2)])
        drain(engine)
        told.append((published.tokens, published.logprobs))
    assert told[0] == told[1] == told[2]
