"""Token ids of a replay: prompts share what they shared when they were sent, whoever tells it."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
from hypothesis import given
from hypothesis import strategies as st

from sojourn.replay.token_tree import give_token_ids, with_sources_by_hash

MISSING = {"prefix_source": None, "prefix_shared_tokens": np.nan, "infinite_hit_tokens": np.nan, "diverged_at": np.nan}


def request(klass: str, prompt: int, output: int = 4, follows: int | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        id="",
        klass=klass,
        prompt_tokens=prompt,
        output_tokens=output,
        follows=follows,
        token_ids=[],
        shared_tokens=0,
        foreign_tokens=0,
        head=0,
    )


sent = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 2), st.integers(1, 60)), min_size=1, max_size=12)


@given(sent)
def test_schedule_tells_what_a_foreign_server_does_not(sent):
    """Two prompts begin alike exactly as far as their class and shared prefix say."""
    prefix_tokens = {"a": 24, "b": 40}
    requests = [request(klass, prefix_tokens[klass] + own) for klass, _, own in sent]
    rows = [
        MISSING | {"scheduled_ns": 0, "shared_prefix": number, "shared_prefix_tokens": prefix_tokens[klass]}
        for klass, number, _ in sent
    ]
    give_token_ids(pd.DataFrame(rows), requests)
    for one, (klass, number, _) in zip(requests, sent, strict=True):
        assert len(one.token_ids) == one.prompt_tokens + one.output_tokens
        for other, (its_klass, its_number, _) in zip(requests, sent, strict=True):
            if other is not one:
                same = (klass, number) == (its_klass, its_number)
                assert common(one.token_ids, other.token_ids) == (prefix_tokens[klass] if same else 0)


def test_turn_begins_with_the_turn_before_it():
    first, second = request("chat", 10), request("chat", 30, follows=0)
    rows = [
        MISSING | {"scheduled_ns": place, "shared_prefix": np.nan, "shared_prefix_tokens": np.nan} for place in (0, 1)
    ]
    give_token_ids(pd.DataFrame(rows), [first, second])
    assert second.token_ids[:14] == first.token_ids and second.shared_tokens == 14


def test_a_request_that_ended_in_the_queue_shares_what_its_hashes_say():
    rows = pd.DataFrame({
        "request_id": ["first", "queued", "other"], "scheduled_ns": [1.0, np.nan, 2.0],
        "prefix_source": [None, None, None], "prefix_shared_tokens": [0.0, np.nan, 0.0],
        "prompt_block_hashes": [[1, 2, 3], [1, 2, 9], [7, 8, 3]], "output_block_hashes": [[4], [], []],
    })  # fmt: skip
    found = with_sources_by_hash(rows, 16)
    assert [name if isinstance(name, str) else None for name in found.prefix_source] == [None, "first", None]
    assert found.prefix_shared_tokens.tolist() == [0.0, 32.0, 0.0]


def common(one: list[int], other: list[int]) -> int:
    return next((place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), 0)
