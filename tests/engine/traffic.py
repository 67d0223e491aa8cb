"""Requests that bring about a case which random traffic seldom has."""

import random

from sojourn.engine.messages import Submit
from sojourn.engine.request.plan import StepPlan
from sojourn.engine.sampling import SamplingParams


def copied_and_loaded(size: int) -> list[list[Submit]]:
    """Messages in turns, each after the end of the one before, for a pool of six blocks of `size` tokens, two requests
    at a time and host memory. In the last turn `given_up_for_loads` one plan: it admits a fork, which copies a block of
    its leader, and then a request whose prefix is in host memory. That request takes the block from the second fork."""
    dice = random.Random(3)
    stored, popular, shared = ([dice.randrange(3, 50) for _ in range(count)] for count in (
        2 * size + 1, 2 * size + 1, size + size // 2
    ))  # fmt: skip
    return [
        [_greedy("stored before", stored, 1)],
        [_greedy("popular", popular, 1)],
        [
            _greedy("beside", popular, size // 2),
            _greedy("leader", shared, size // 2),
            _greedy("first fork", shared, 2 * size, fork_of="leader"),
            _greedy("stored", stored, size),
            _greedy("second fork", shared, 2 * size, fork_of="leader"),
        ],
    ]


def given_up_for_loads(plan: StepPlan) -> set[int]:
    """KV blocks that a step copies to others, and loads other contents into."""
    transfers = plan.parts.get("tiers")
    loaded = () if transfers is None else (block for _, block in transfers.loads)
    return {source for source, _ in plan.copies}.intersection(loaded)


def _greedy(request_id: str, prompt: list[int], max_tokens: int, fork_of: str | None = None) -> Submit:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Submit(request_id, prompt, sampling, encoded_ns=0, fork_of=fork_of)
