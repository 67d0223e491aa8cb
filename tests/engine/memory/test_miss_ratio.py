"""The curve that one run draws, against real runs with pools of those sizes."""

from collections import deque
from random import Random

import pytest

from sojourn.engine.messages import Submit
from sojourn.engine.request.plan import ScheduledTokens
from sojourn.engine.sampling import SamplingParams
from sojourn.metrics.memory.prefix_outcomes import RATIOS
from tests.engine.simulated import CheckedModel, Simulation

BLOCK = 16
MS = 1_000_000
Trace = list[tuple[int, list[int], int]]  # due_ns, prompt, output tokens


class QuickDevice(CheckedModel):
    """Takes the same time, and looks into no slot: its tokens depend on who asks and where he is."""

    def tokens(self, item: ScheduledTokens) -> list[int]:
        return [sampled_token(item.request.arrival_index, item.past_tokens + item.new_tokens)] if item.samples else []


def sampled_token(order: int, position: int) -> int:
    return 1000 + (order * 7919 + position * 104_729) % 50_000


def text(seed: object, length: int) -> list[int]:
    rng = Random(str(seed))
    return [rng.randrange(1000) for _ in range(length)]


def arrivals(seed: int, mean_ms: float):
    """Times of a Poisson process, nanoseconds."""
    rng, now_ns = Random(seed), 0.0
    while True:
        now_ns += rng.expovariate(1 / (mean_ms * MS))
        yield int(now_ns)


def zipf(requests: int, mean_ms: float = 30, prefixes: int = 60) -> Trace:
    """Documents that are asked for again, few of them often; each with a question of its own."""
    rng, weights = Random(1), [1 / rank for rank in range(1, prefixes + 1)]
    trace = []
    for due_ns, _ in zip(arrivals(2, mean_ms), range(requests), strict=False):
        document = rng.choices(range(prefixes), weights)[0]
        trace.append((due_ns, text(document, 64 + document * 37 % 192) + text(("q", due_ns), 21), 12))
    return trace


def sessions(requests: int, mean_ms: float = 30, live: int = 30, turns: int = 8) -> Trace:
    """Conversations that grow by what was answered and by the next question; old ones end and new ones begin."""
    rng, trace, histories = Random(3), [], {}
    for order, (due_ns, _) in enumerate(zip(arrivals(4, mean_ms), range(requests), strict=False), 1):
        place = rng.randrange(live)
        turn, history = histories.get(place, (0, text(("first", due_ns), 40)))
        trace.append((due_ns, history, 20))
        answer = [sampled_token(order, len(history) + index) for index in range(20)]
        following = (turn + 1, history + answer + text(("next", due_ns), 25))
        histories[place] = following if turn + 1 < turns else (0, text(("first", due_ns), 40))
    return trace


def shared_system_prompt(requests: int, mean_ms: float = 30) -> Trace:
    """A dozen long beginnings that all share, then what nobody repeats."""
    rng = Random(5)
    return [
        (due_ns, text(("system", rng.randrange(12)), 160) + text(("user", due_ns), rng.randrange(30, 160)), 15)
        for due_ns, _ in zip(arrivals(6, mean_ms), range(requests), strict=False)
    ]


def one_shot_long(requests: int, mean_ms: float = 40) -> Trace:
    """Among prompts that come again, long ones that never do and push them out."""
    rng, trace = Random(7), zipf(requests, mean_ms, prefixes=30)
    return [
        (due_ns, text(("long", due_ns), 700), 4) if rng.random() < 0.08 else (due_ns, prompt, output)
        for due_ns, prompt, output in trace
    ]


def play(trace: Trace, num_blocks: int, prefix_caching: bool = True, **limits) -> Simulation:
    """Serves the sequence with its own times, whatever the pool."""
    limits = {"max_num_seqs": 16, "max_num_batched_tokens": 256} | limits
    simulation = Simulation(num_blocks, BLOCK, prefix_caching, device=QuickDevice, **limits)
    simulation.check = lambda: None
    due = deque((due_ns, Submit(f"r{index}", prompt, SamplingParams(max_tokens=output, temperature=0), due_ns))
                for index, (due_ns, prompt, output) in enumerate(trace))  # fmt: skip
    while due or simulation.engine.has_work:
        if not simulation.engine.has_work:
            simulation.clock.now_ns = max(simulation.clock.now_ns, due[0][0])
        arrived = []
        while due and due[0][0] <= simulation.clock.now_ns:
            arrived.append(due.popleft()[1])
        if arrived:
            simulation.receive(*arrived)
        simulation.step()
    simulation.engine.flush()
    return simulation


def hit_ratio(simulation: Simulation, prompt_tokens: int) -> float:
    return sum(ended.cached_tokens for ended in simulation.published.ended.values()) / prompt_tokens


def predicted(simulation: Simulation, prompt_tokens: int) -> list[float]:
    reports = [ended.prefix for ended in simulation.published.ended.values()]
    assert sum(sum(report.prefix_outcomes.values()) for report in reports) == prompt_tokens
    return [sum(report.resized_hit_tokens[size] for report in reports) / prompt_tokens for size in range(len(RATIOS))]


def compare(trace: Trace, num_blocks: int, **limits) -> list[tuple[float, float]]:
    """Predicted and real hit ratio for each size."""
    tokens = sum(len(prompt) for _, prompt, _ in trace)
    curve = predicted(play(trace, num_blocks, **limits), tokens)
    real = [hit_ratio(play(trace, int(ratio * num_blocks), **limits), tokens) for ratio in RATIOS]
    return list(zip(curve, real, strict=True))


def assert_matches(points: list[tuple[float, float]]) -> None:
    shown = " ".join(f"{ratio:g}×: {curve:.3f}/{real:.3f}" for ratio, (curve, real) in zip(RATIOS, points, strict=True))
    assert points[1][0] == points[1][1], f"its own size is exact: {shown}"
    assert max(abs(curve - real) for curve, real in points) <= 0.02, shown
    assert points[-1][1] - points[0][1] > 0.1, f"the sizes differ, or this proves nothing: {shown}"


def test_the_curve_of_one_run_is_what_pools_of_those_sizes_do():
    assert_matches(compare(zipf(150), 90))


def test_with_caching_off_the_curve_is_that_of_caching_on():
    trace = zipf(120)
    tokens = sum(len(prompt) for _, prompt, _ in trace)
    off = predicted(play(trace, 160, prefix_caching=False), tokens)
    on = predicted(play(trace, 160), tokens)
    assert max(abs(a - b) for a, b in zip(off, on, strict=True)) <= 0.02
    assert on[1] > 0.1


WORKLOADS = {"zipf": zipf, "sessions": sessions, "system prompt": shared_system_prompt, "one-shot long": one_shot_long}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("num_blocks", [100, 200, 400])
@pytest.mark.parametrize("load", [1.0, 2.0], ids=["easy", "busy"])
def test_the_curve_matches_real_runs_of_every_workload(workload, num_blocks, load):
    trace = [(int(due_ns / load), prompt, output) for due_ns, prompt, output in WORKLOADS[workload](600)]
    points = compare(trace, num_blocks)
    shown = " ".join(f"{ratio:g}×: {curve:.3f}/{real:.3f}" for ratio, (curve, real) in zip(RATIOS, points, strict=True))
    tolerances = [0.04, 0.02, 0.02, 0.02, 0.02]  # half of a busy pool cannot hold what ran together in the whole of it
    assert all(abs(curve - real) <= bound for (curve, real), bound in zip(points, tolerances, strict=True)), shown
