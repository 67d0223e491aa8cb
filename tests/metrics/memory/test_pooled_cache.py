"""What a fleet's servers held of each prompt, from their records alone, against token sequences compared one by one."""

import random

import pandas as pd
import pytest

from sojourn.metrics.ledger import new_ledger
from sojourn.metrics.memory.pooled_cache import pooled_cache
from sojourn.metrics.records import RequestRecord
from sojourn.metrics.records.tables import row

SIZE = 4


def chain(tokens: list[int]) -> list[int]:
    return [hash(tuple(tokens[: end + SIZE])) for end in range(0, len(tokens) - SIZE + 1, SIZE)]


def common(one: list[int], other: list[int]) -> int:
    """Tokens of whole blocks with which both begin."""
    same = next((place for place, pair in enumerate(zip(one, other, strict=False)) if len(set(pair)) > 1),
                min(len(one), len(other)))  # fmt: skip
    return same // SIZE * SIZE


def record(name: str, server: str, at: int, prompt: list[int], output: list[int], hits: int, own: int, **more):
    hashes, reusable = chain(prompt + output[:-1]), (len(prompt) - 1) // SIZE
    ledger = new_ledger()
    return RequestRecord(**{
        "request_id": name, "arrived_ns": at, "scheduled_ns": at, "token_ns": [at + 2, at + 3], "finished_ns": at + 4,
        "server": server, "finish_reason": "length", "prompt_tokens": len(prompt), "infinite_hit_tokens": own,
        "prefix_outcomes": {"hit": hits, "miss_cold": len(prompt) - hits}, "ledger": ledger,
        "prompt_block_hashes": hashes[:reusable], "output_block_hashes": hashes[reusable:],
    } | more)  # fmt: skip


def table(records: list[RequestRecord]) -> pd.DataFrame:
    rows = pd.DataFrame([row(each) for each in records])
    rows["prefix_outcomes"] = rows.prefix_outcomes.map(dict)
    rows["ledger_compute_prefill_ns"] = [10 * (len(each.prompt_block_hashes) + 1) for each in records]
    return rows


@pytest.mark.parametrize("seed", range(20))
def test_best_server_has_what_a_comparison_of_all_tokens_says(seed):
    dice = random.Random(seed)
    names = [f"server-{number}" for number in range(dice.randint(2, 4))]
    seen: list[tuple[str, list[int]]] = []  # server and tokens that it computed
    records, expected = [], []
    for place in range(40):
        begin = list(dice.choice(seen)[1]) if seen and dice.random() < 0.7 else []
        prompt = begin[: dice.randint(0, len(begin))] + [dice.randint(0, 2) for _ in range(dice.randint(1, 12))]
        output = [dice.randint(0, 2) for _ in range(dice.randint(2, 9))]
        server = dice.choice(names)
        usable = prompt[:-1]
        held = {name: max((common(usable, old) for where, old in seen if where == name), default=0) for name in names}
        hits = dice.randint(0, held[server] // SIZE) * SIZE  # a real cache has evicted some
        records.append(record(f"r{place}", server, 10 * place, prompt, output, hits, held[server]))
        expected.append((hits, held[server], max(held.values())))
        seen.append((server, prompt + output[:-1]))
    found = pooled_cache(table(records), SIZE)
    assert (
        list(found.requests[["hit_tokens", "own_tokens", "best_tokens"]].itertuples(index=False, name=None)) == expected
    )
    blind = table(records).assign(infinite_hit_tokens=0)  # only hashes tell what the own server had
    again = pooled_cache(blind, SIZE)
    assert again.requests.own_tokens.to_list() == found.requests.own_tokens.to_list()
    fleet = found.fleet
    assert fleet.hit_tokens + fleet.evicted_tokens + fleet.lost_tokens == fleet.best_tokens
    for name in ("requests", "prompt_tokens", "lost_tokens", "best_tokens", "evicted_tokens"):
        assert sum(getattr(server, name) for server in found.servers) == getattr(fleet, name)


def test_a_prompt_that_is_still_computed_on_another_server_is_no_loss():
    prompt = list(range(13))
    first = record("a", "server-0", 0, prompt, [1, 2], 0, 0)
    during = record("b", "server-1", 1, prompt, [1, 2], 0, 0)
    after = record("c", "server-1", 2, prompt, [1, 2], 0, 0)
    found = pooled_cache(table([first, during, after]), SIZE)
    assert found.requests.lost_tokens.to_list() == [0, 0, 12]
    assert found.requests.best_server.to_list() == ["server-0", "server-1", "server-0"]


def test_lost_tokens_cost_what_a_computed_token_costs():
    prompt = list(range(13))
    found = pooled_cache(table([record("a", "server-0", 0, prompt, [1, 2], 0, 0),
                                record("b", "server-1", 9, prompt, [1, 2], 0, 0)]), SIZE)  # fmt: skip
    assert found.fleet.prefill_ns_per_token == pytest.approx(80 / 26)
    assert found.fleet.lost_ns == pytest.approx(12 * 80 / 26)
    assert found.fleet.hit_rate == 0 and found.fleet.pooled_rate == 12 / 26


def test_what_does_not_count_still_fills_the_cache():
    prompt = list(range(13))
    rows = table([record("warm", "server-0", 0, prompt, [1, 2], 0, 0),
                  record("b", "server-1", 9, prompt, [1, 2], 0, 0)])  # fmt: skip
    found = pooled_cache(rows, SIZE, {"b"})
    assert found.requests.request_id.to_list() == ["b"] and found.fleet.lost_tokens == 12


def test_a_request_that_ended_within_its_prompt_left_nothing_known():
    prompt = list(range(13))
    aborted = record("a", "server-0", 0, prompt, [1, 2], 0, 0, finish_reason="abort", token_ns=[],
                     output_block_hashes=[])  # fmt: skip
    found = pooled_cache(table([aborted, record("b", "server-1", 9, prompt, [1, 2], 0, 0)]), SIZE)
    assert found.requests.lost_tokens.to_list() == [0, 0]


def test_older_runs_have_no_pooled_cache():
    rows = table([record("a", "server-0", 0, list(range(13)), [1, 2], 0, 0)])
    assert pooled_cache(rows.drop(columns="prompt_block_hashes"), SIZE) is None
    assert pooled_cache(rows.assign(prompt_block_hashes=None, output_block_hashes=None), SIZE) is None
