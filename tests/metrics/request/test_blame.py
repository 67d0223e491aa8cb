"""Each kind of waiting is laid at the right door, by answers that can be worked out by hand."""

import numpy as np
import pandas as pd
import pytest

from sojourn.metrics.request.blame import (
    MOST_GROUPS,
    OTHERS,
    UNEXPLAINED,
    between,
    blame_of,
    gini,
    matrix,
    offenders,
    worst,
)
from sojourn.metrics.request.offenders import Book, open_book
from tests.metrics.scenes import MS, Scene

BLOCK = 4


def opened(scene: Scene) -> Book:
    return open_book(*scene.tables(), None, block_size=BLOCK)


def blamed_ms(book: Book, victim: str) -> dict[str, float]:
    """Offender → ms of this victim, from the matrix; and the same as `blame_of` tells it."""
    names = pd.Series(book.line.calls, index=book.line.calls)
    found = matrix(book, names).loc[victim]
    alone = blame_of(book, victim).groupby("offender").ns.sum()
    for name, ns in alone.items():
        assert found[name] == pytest.approx(ns, abs=2)
    return {name: pytest.approx(ns / MS, abs=1e-3) for name, ns in found.items() if abs(ns) > 1}


def runs(*names: str, new: int = 1, past: int = 7) -> list[tuple[str, str, int, int]]:
    return [(name, "decode", new, past) for name in names]


def test_who_waits_for_a_place_waits_for_all_who_hold_one_alike():
    scene = Scene()
    for _ in range(4):
        scene.step(("a", "decode", 1, 31), *runs("b"), reason="batch_cap")
    scene.step(("a", "prefill", 15, 32), *runs("b"), reason="batch_cap")
    scene.step(*runs("v"))
    for name in "ab":
        scene.request(name, 0)
    scene.request("v", 5, request_queue=45, waits={"step": 5, "batch_cap": 40})
    assert blamed_ms(opened(scene), "v") == {"a": 22.5, "b": 22.5}


def test_who_waits_for_tokens_waits_for_those_who_compute_them():
    scene = Scene()
    scene.step(("a", "prefill", 48, 0), *runs("b"), reason="token_budget")
    scene.step(("a", "prefill", 15, 48), *runs("b"), reason="token_budget")
    scene.step(*runs("v"))
    scene.request("a", 0, 63, request_queue=0)
    scene.request("b", 0, request_interference=48 / 49 * 10 + 15 / 16 * 10)
    scene.request("v", -1, request_queue=20, waits={"token_budget": 20})
    book = opened(scene)
    assert blamed_ms(book, "v") == {"a": 48 / 49 * 10 + 15 / 16 * 10, "b": 10 / 49 + 10 / 16}
    assert blamed_ms(book, "b") == {"a": 48 / 49 * 10 + 15 / 16 * 10}


def test_who_waits_for_blocks_waits_for_all_who_hold_them():
    scene = Scene()
    scene.step(("a", "decode", 1, 11), ("b", "decode", 1, 3), reason="kv_blocks")  # 3 blocks and 1
    scene.step(("b", "decode", 1, 4), reason="kv_blocks")  # a still holds its 3, b has 2
    scene.step(("a", "decode", 1, 12), *runs("v"))
    scene.request("a", 0, request_interference=10)
    scene.request("b", 0)
    scene.request("v", -1, memory_blocked=20, waits={"kv_blocks": 20})
    book = opened(scene)
    assert blamed_ms(book, "v") == {"a": 7.5 + 6, "b": 2.5 + 4}
    assert blamed_ms(book, "a") == {"b": 10}, "a step without it is the fault of those who were in it"


def test_preempted_request_waits_for_who_took_its_blocks_then_for_who_holds_some():
    scene = Scene()
    scene.step(*runs("v", "a", "b", past=3))
    scene.step(*runs("a", "b", past=4), taken={"v": "a"})
    scene.step(*runs("a", "b", past=5))
    scene.step(*runs("b", past=6), *runs("c", past=3))  # a has ended; b holds two blocks, c one
    scene.step(("v", "recompute", 4, 0), *runs("b", past=7))
    for name in "abc":
        scene.request(name, 0, request_interference=8 if name == "b" else 0)
    scene.request("v", 0, memory_preempted=30)
    assert blamed_ms(opened(scene), "v") == {"a": 20, "b": 20 / 3, "c": 10 / 3}


def test_request_that_could_not_grow_itself_waits_for_those_who_hold_blocks():
    scene = Scene()
    scene.step(*runs("v", "a", past=3))
    scene.step(*runs("a", past=4), taken={"v": "v"})
    scene.step(*runs("v", "a", past=5))
    scene.request("a", 0)
    scene.request("v", 0, memory_preempted=10)
    assert blamed_ms(opened(scene), "v") == {"a": 10}


def test_further_choice_waits_for_its_first_and_long_prompt_for_those_before():
    scene = Scene()
    scene.step(("v", "prefill", 8, 0), ("a", "prefill", 8, 0), *runs("b"), reason="policy")
    scene.step(("v#1", "decode", 1, 8), *runs("b"))
    scene.step(("v#1", "decode", 1, 9), ("long", "prefill", 8, 0))
    scene.request("v", -1, 8, request_queue=10, request_interference=10 * 8 / 9, waits={"leader": 10})
    scene.request("a", 0, 8, request_interference=10 * 8 / 17)
    scene.request("b", 0, request_interference=10 * 16 / 17)
    scene.request("long", -1, 8, request_queue=20, waits={"policy": 20})
    book = opened(scene)
    found = blame_of(book, "v").set_index(["reason", "offender"]).ns / MS
    assert found[("leader", "v")] == pytest.approx(10)
    assert blamed_ms(book, "long") == {"v": 5 + 5, "a": 5, "b": 5}


def test_request_that_came_during_a_step_waits_for_what_is_in_it_by_its_work():
    scene = Scene()
    scene.step(("a", "prefill", 3, 0), *runs("b"))
    scene.step(*runs("v"))
    scene.request("a", 0, 3, request_interference=0)
    scene.request("b", 0, request_interference=7.5)
    scene.request("v", 2, request_queue=8, waits={"step": 8})
    assert blamed_ms(opened(scene), "v") == {"a": 6, "b": 2}


def test_what_the_steps_do_not_explain_is_a_column_of_its_own():
    scene = Scene()
    scene.step(*runs("a"), reason="batch_cap")
    scene.step(*runs("v"))
    scene.request("a", 0)
    scene.request("v", 0, request_queue=25, waits={"batch_cap": 25})
    assert blamed_ms(opened(scene), "v") == {"a": 10, UNEXPLAINED: 15}


def test_request_that_was_never_admitted_waits_until_its_end():
    scene = Scene()
    for _ in range(3):
        scene.step(*runs("a"), reason="batch_cap")
    scene.request("a", 0)
    scene.request("v", 10, request_queue=20, waits={"batch_cap": 20})
    assert blamed_ms(opened(scene), "v") == {"a": 20}


def crowd() -> Book:
    """Two tenants: three chats wait for one long prompt, and for each other's prompts."""
    scene = Scene()
    scene.step(("long", "prefill", 60, 0), reason="token_budget")
    scene.step(*(("long", "prefill", 60, 60), *[(f"c{i}", "prefill", 4, 0) for i in range(3)]))
    scene.step(*runs("long", "c0", "c1", "c2"))
    scene.request("long", 0, 120, tenant="bulk", klass="document", request_interference=10 * 12 / 72)
    for index in range(3):
        scene.request(f"c{index}", 0, 4, tenant="shop", klass="chat", request_queue=10,
                      request_interference=10 * 68 / 72, waits={"token_budget": 10})  # fmt: skip
    return opened(scene)


def test_groups_sum_up_their_members():
    book = crowd()
    by_class = between(book, "klass") / MS
    assert by_class.loc["chat", "document"] == pytest.approx(3 * (10 + 10 * 60 / 72), abs=1e-3)
    assert by_class.loc["chat", "chat"] == pytest.approx(3 * 10 * 8 / 72, abs=1e-3)
    assert by_class.loc["document", "chat"] == pytest.approx(10 * 12 / 72, abs=1e-3)
    assert by_class[UNEXPLAINED].abs().max() < 1e-3
    assert between(book, "tenant").to_numpy().sum() == pytest.approx(by_class.to_numpy().sum() * MS)
    assert list(between(book, "band").index) == ["1 to 128 tokens"]


def test_a_thousand_tenants_are_the_largest_and_all_others():
    scene = Scene()
    scene.step(("long", "prefill", 64, 0), reason="token_budget")
    scene.step(*((f"c{i}", "prefill", 1 + i, 0) for i in range(MOST_GROUPS + 10)))
    scene.request("long", 0, 64, tenant="bulk")
    for index in range(MOST_GROUPS + 10):
        scene.request(f"c{index}", 0, 1 + index, tenant=f"t{index}", request_queue=10, waits={"token_budget": 10})
    book = opened(scene)
    table = between(book, "tenant")
    assert len(table) == MOST_GROUPS + 1 and set(table.columns) == {*table.index, UNEXPLAINED}
    assert {"bulk", OTHERS, f"t{MOST_GROUPS + 9}"} <= set(table.index) and "t0" not in table.index
    np.testing.assert_allclose(table.sum().sum(), book.booked_ns.sum(), atol=1)
    assert table["bulk"].sum() / MS == pytest.approx(10 * (MOST_GROUPS + 10), abs=1e-3)


def test_worst_offenders_come_first_and_the_rest_in_one_column():
    book = crowd()
    table = offenders(book)
    assert table.request_id[0] == "long" and table.klass[0] == "document"
    assert table.caused_ns[0] / MS == pytest.approx(3 * (10 + 10 * 60 / 72), abs=1e-3)
    whole = matrix(book, pd.Series(book.line.calls, index=book.line.calls))
    top = worst(book, 1)
    assert list(top.columns) == ["long", OTHERS, UNEXPLAINED]
    np.testing.assert_allclose(top.sum(axis=1), whole.sum(axis=1), atol=1)
    np.testing.assert_allclose(top["long"], whole["long"], atol=1)


def test_gini_tells_one_culprit_from_many():
    assert gini(np.ones(10)) == pytest.approx(0)
    assert gini(np.array([0.0] * 99 + [1.0])) == pytest.approx(0.99)
    assert np.isnan(gini(np.zeros(3)))


def test_request_of_another_run_is_no_victim():
    with pytest.raises(KeyError):
        blame_of(crowd(), "absent")
