"""Nothing that the scheduler or the memory decides changes a token, greedy or drawn with a seed, on the real engine;
and whatever it decides, every nanosecond of a request is booked."""

import random
import time

import pytest

from sojourn.engine.messages import Submit
from sojourn.engine.request.policies import POLICIES
from tests.engine.harness import drain, hand_over, make_engine, submit
from tests.further import further

LENGTHS = (1, 15, 16, 17, 40, 90)
MAX_TOKENS = 10
TENANTS = ("a", "b")


def traffic() -> list[Submit]:
    """Greedy and seeded requests of many lengths; some share a beginning, two fork another, priorities differ."""
    dice = random.Random(4)
    shared = [dice.randrange(3, 320) for _ in range(33)]
    messages = []
    for index, length in enumerate(LENGTHS * 2):
        prompt = ((shared if index % 3 == 0 else []) + [dice.randrange(3, 320) for _ in range(length)])[:120]
        sampling = {} if index % 2 else {"temperature": 0.9, "top_p": 0.9, "seed": index}
        messages.append(_with(submit(f"r{index}", prompt, MAX_TOKENS, **sampling), index))
    for index in (4, 5):
        fork = submit(f"fork{index}", messages[index].prompt_token_ids, MAX_TOKENS, temperature=1.0, seed=index + 50)
        messages.append(_with(fork, index, messages[index].request_id))
    return messages


def _with(message: Submit, index: int, fork_of: str | None = None) -> Submit:
    return Submit(
        message.request_id, message.prompt_token_ids, message.sampling, message.encoded_ns,
        tenant=TENANTS[index % 2], priority=index % 3, fork_of=fork_of,
    )  # fmt: skip


def tokens_of(folder, messages: list[Submit], together: int = 100, **settings) -> tuple[dict[str, list[int]], int]:
    """Tokens by request, and how often one was preempted. `together` of them are handed over, then a step is made."""
    engine, published = make_engine(folder, **settings)
    begin_ns = time.monotonic_ns()
    for first in range(0, len(messages), together):
        engine.receive(messages[first : first + together], begin_ns)
        begin_ns = engine.step()
    engine.receive([], begin_ns)
    drain(engine, check=True)
    for message in messages:
        for committed_ns, ledger in published.ledgers[message.request_id]:
            assert sum(ledger) == committed_ns - message.encoded_ns and min(ledger) >= 0
    counts = engine.scheduler.pool.counts()
    assert counts.active == 0 and not engine.scheduler.requests
    return published.tokens, sum(ended.preemptions for ended in published.ended.values())


@pytest.fixture(scope="module")
def alone(checkpoints):
    """Each request by itself, on an engine that has nothing cached."""
    tokens = {}
    engine, published = make_engine(checkpoints["llama"], prefix_caching=False)
    for message in traffic():
        hand_over(engine, [message])
        drain(engine)
    tokens |= published.tokens
    assert len({tuple(value) for value in tokens.values()}) > len(LENGTHS)
    return tokens


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_seqs": 3, "max_num_batched_tokens": 24, "max_prefill_chunk_tokens": 7},
        {"num_kv_blocks": 14, "max_model_len": 150, "prefix_caching": False},
        *further(
            {"num_kv_blocks": 40, "block_size": 5, "max_model_len": 150, "max_num_batched_tokens": 33},
            {"max_long_prefills": 1, "long_prefill_tokens": 20, "max_num_batched_tokens": 16, "block_size": 1,
             "num_kv_blocks": 1024},
        ),
    ],
    ids=["default", "small steps", "small memory", "odd blocks", "long prompts one by one"],
)  # fmt: skip
def test_no_policy_and_no_setting_changes_a_token(policy, settings, checkpoints, alone):
    assert tokens_of(checkpoints["llama"], traffic(), together=4, policy=policy, **settings)[0] == alone


@pytest.mark.parametrize("seed", [0, *further(1, 2)])
def test_no_order_of_arrival_changes_a_token(seed, checkpoints, alone):
    messages = traffic()
    random.Random(seed).shuffle(messages)
    assert tokens_of(checkpoints["llama"], messages, together=5)[0] == alone


def test_preemption_by_priority_changes_no_token(checkpoints, alone):
    messages = sorted(traffic(), key=lambda message: -message.priority)  # the least urgent first
    settings = {"policy": "priority", "max_num_seqs": 3, "prefix_caching": False}
    tokens, preemptions = tokens_of(checkpoints["llama"], messages, together=2, **settings)
    assert preemptions > 0 and tokens == alone


def test_preemption_for_memory_changes_no_token(checkpoints, alone):
    tokens, preemptions = tokens_of(checkpoints["llama"], traffic(), num_kv_blocks=10, max_model_len=150)
    assert preemptions > 0 and tokens == alone
