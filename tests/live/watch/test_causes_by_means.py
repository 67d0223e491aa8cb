"""Causes that one page of vLLM shows, planted in a simulated one: named from some severity on, and silent below."""

from dataclasses import replace

import pytest
from prometheus_client import Gauge

from tests.live.watch.simulated_vllm import Device, Load
from tests.live.watch.test_simulated import said
from tests.metrics.foreign import VllmPage, steady
from tests.metrics.live_pages import observed

ROWS_COST = Device(step_s=0.012, prompt_token_s=0.0001, decode_s=0.0012)
ROWS_ARE_FREE = Device(step_s=0.02, prompt_token_s=0.00005, decode_s=0.00001)
LONG_PROMPTS = Device(step_s=0.012, prompt_token_s=0.0006, decode_s=0.0005)
RISING = (Load(2.5), Load(1, 20))
RETRIEVAL = (Load(2, prompt_tokens=600, output_tokens=20),)
DRAFTS, TIER = dict(loads=RISING, device=ROWS_COST, drafts=4), dict(loads=RETRIEVAL, device=LONG_PROMPTS)
TWO = dict(engines=2, cap=8, device=Device(step_s=0.012, prompt_token_s=0.0001, decode_s=0.0035))
FULL = dict(kv_tokens=1400)  # two requests
STORM = dict(loads=(Load(3, prompt_tokens=150, output_tokens=230),), device=Device())


def hits(*rates: tuple[float, float]) -> dict:
    """Prompts that share so much of their tokens from a second on: (second, share)."""
    until = [second for second, _ in rates[1:]] + [1e9]
    return TIER | dict(loads=tuple(
        Load(2, second, end, prompt_tokens=600, output_tokens=20, cached=share)
        for (second, share), end in zip(rates, until, strict=True)
    ))  # fmt: skip


def beside(*per_s: float) -> dict:
    """Engines with a load each."""
    return TWO | dict(loads=tuple(Load(rate, engine=engine) for engine, rate in enumerate(per_s)))


FAST = Device(step_s=0.012, prompt_token_s=0.0001, decode_s=0.0002)
ADAPTERS = dict(loads=(Load(5, adapters=8),), device=FAST)
# Cause → server, objectives, what its sentence says; "" for a server that must not be blamed for it
PLANTED = {
    "rejected_drafts": [
        (DRAFTS | dict(accepted=0.05), {"tpot_ms": 25.0}, "1% of the drafts were accepted"),
        (DRAFTS | dict(accepted=0.15), {"tpot_ms": 25.0}, "gives 1.2 tokens"),
        (DRAFTS | dict(accepted=0.05, loads=(Load(8),)), {"tpot_ms": 50.0}, "which costs up to 79%"),
        (DRAFTS | dict(accepted=0.8), {"tpot_ms": 10.0}, ""),
        (DRAFTS | dict(accepted=0.1, loads=(Load(10),), device=ROWS_ARE_FREE), {"tpot_ms": 10.0}, ""),
        (DRAFTS | dict(drafts=0), {"tpot_ms": 10.0}, ""),
    ],
    "slow_kv_tier": [
        (TIER | dict(external=True), {"ttft_ms": 500.0}, "0.0% of the 48,000 tokens"),
        (TIER | dict(external=True, lookup_s=0.2), {"ttft_ms": 500.0}, "the external cache spares none of it"),
        (TIER, {"ttft_ms": 500.0}, ""),
        (TIER | dict(external=True), {"ttft_ms": 2500.0}, ""),
    ],
    "cache_thrash": [
        (hits((0, 0.9), (25, 0.0)) | FULL, {"ttft_ms": 400.0}, "stopped 19 s before the last page: they were 90%"),
        (hits((0, 0.9), (25, 0.1)) | FULL, {"ttft_ms": 300.0}, "fell to 10%"),
        (hits((0, 0.1)), {"ttft_ms": 400.0}, ""),
        (hits((0, 0.9), (25, 0.6)), {"ttft_ms": 150.0}, ""),
        (hits((0, 0.9), (25, 0.0)) | dict(kv_tokens=2600), {"ttft_ms": 400.0}, ""),  # fills after the fall, by it
        (hits((0, 0.9), (25, 0.0)), {"ttft_ms": 400.0}, ""),
    ],
    "replica_imbalance": [
        (beside(9, 1), {"ttft_ms": 1000.0}, "gather on engine 0"),
        (beside(2, 7), {}, "gather on engine 1"),
        (beside(5, 4), {"ttft_ms": 1000.0}, ""),
        (beside(9, 9), {"ttft_ms": 1000.0}, ""),
    ],
    "slow_front": [
        (dict(loads=(Load(9),), device=FAST, front_s=0.125), {"ttft_ms": 500.0}, "of one core"),
        (dict(loads=(Load(9),), device=FAST, front_s=0.15), {"ttft_ms": 2000.0}, "passes in the front"),
        (dict(loads=(Load(4),), device=FAST, front_s=0.05), {"ttft_ms": 100.0}, ""),
        (dict(loads=(Load(9),), cap=2, device=FAST, front_s=0.001), {"ttft_ms": 300.0}, ""),
    ],
    "adapter_slots": [
        (ADAPTERS | dict(slots=1), {"ttft_ms": 500.0}, "1 at a time has a slot"),
        (ADAPTERS | dict(slots=2, loads=(Load(12, adapters=12),)), {"ttft_ms": 500.0}, "2 at a time have a slot"),
        (ADAPTERS | dict(slots=8), {"ttft_ms": 500.0}, ""),
        (ADAPTERS | dict(slots=8, cap=2, loads=(Load(8, adapters=8),)), {"ttft_ms": 500.0}, ""),
    ],
    "own_prefill": [
        (hits((0, 0.9), (15, 0.0)), {"ttft_ms": 400.0}, "prompts share less since"),
        (hits((0, 0.9), (25, 0.0)) | FULL, {"ttft_ms": 400.0}, ""),
        (hits((0, 0.0)), {"ttft_ms": 400.0}, ""),
    ],
    "engine_stall": [
        (dict(loads=(Load(2),), device=FAST, stands=(4.0, 2.5, 6.0)), {"ttft_ms": 250.0}, "the engine stood still"),
        (dict(loads=(Load(8),), device=FAST, stands=(4.0, 3.8, 9.0)), {"ttft_ms": 500.0}, "the engine stood still"),
        (dict(loads=(Load(4, burst=20),), device=LONG_PROMPTS), {"ttft_ms": 100.0}, ""),
        (dict(loads=(Load(1, prompt_tokens=1900),), device=FAST, stands=(4.0, 2.5, 6.0)), {"ttft_ms": 250.0}, ""),
        (dict(loads=(Load(2),), device=FAST, stands=(30.0, 2.5, 60.0)), {"ttft_ms": 250.0}, ""),
    ],
    "kv_pool": [
        (STORM | dict(kv_tokens=2048), {"tpot_ms": 25.0}, "lose their KV blocks and compute them"),
        (STORM | dict(kv_tokens=2560), {"tpot_ms": 25.0}, "again: 91 preemptions"),
        (STORM, {"tpot_ms": 10.0}, ""),
    ],
}  # fmt: skip
ALWAYS = {0, 3, 6, 8, 10, 14, 16, 18, 20, 24, 28, 31, 36, 38}  # the rest only with the thorough ones
HEALTHY = {  # servers that have all that the causes read, and requests per second that fill them
    "drafts": (DRAFTS | dict(accepted=0.8), 8),
    "prefixes": (hits((0, 0.8)), 6),
    "engines": (TWO, 4.5),
    "front": (dict(loads=(Load(1),), device=FAST, front_s=0.05), 10),
    "adapters": (ADAPTERS | dict(slots=8), 10),
}
CASES = [(key, *case) for key, cases in PLANTED.items() for case in cases]


@pytest.mark.parametrize(("key", "settings", "objectives", "words"), [
    pytest.param(*case, id=f"{case[0]} {number}", marks=() if number in ALWAYS else pytest.mark.thorough)
    for number, case in enumerate(CASES)
])  # fmt: skip
def test_a_planted_cause_is_named_where_it_costs_time_and_nowhere_else(key, settings, objectives, words):
    found = said(settings, 45, 0, objectives)[1].watched().findings
    assert (key in [each.key for each in found[:1]]) == bool(words), found
    assert words in next((each.cause for each in found), ""), found
    assert all(each.probe.measurement and each.probe.rival for each in found)


@pytest.mark.parametrize("load", [pytest.param(0.3, marks=pytest.mark.thorough), 0.6,
                                  pytest.param(0.8, marks=pytest.mark.thorough)])  # fmt: skip
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.thorough if name in ("front", "adapters") else ()) for name in HEALTHY
])  # fmt: skip
def test_no_cause_is_named_on_a_healthy_server(name, load):
    settings, full = HEALTHY[name]
    first = settings.get("loads", (Load(1),))[0]
    settings = settings | dict(loads=(replace(first, per_s=load * full),))
    changes, observer = said(settings, 60, 0, {"ttft_ms": 2500.0, "tpot_ms": 100.0})
    assert {state for _, state, _, _ in changes} == {"healthy"}, changes
    assert not observer.watched().findings


class DeferringPage(VllmPage):
    """Of a version that says why requests wait: all for the same reason."""

    def __init__(self, reason: str, asks_elsewhere: bool, **parts):
        super().__init__(**parts)
        labels = ("model_name", "engine", "reason")
        self.by_reason = Gauge("vllm:num_requests_waiting_by_reason", "x", labels, registry=self.registry)
        self.reason, self.asks_elsewhere = reason, asks_elsewhere

    def show(self, running: int, waiting: int, kv_use: float, engine: int) -> None:
        super().show(running, waiting, kv_use, engine)
        for reason in ("capacity", "deferred"):
            self.by_reason.labels("m", str(engine), reason).set(waiting if reason == self.reason else 0)
        self.of[engine]["external_queries"].inc(100 if self.asks_elsewhere else 0)


@pytest.mark.parametrize(("reason", "asks_elsewhere", "adapters", "first"), [
    ("deferred", False, False, "slow_grammar"), ("capacity", False, False, "batch_cap"),
    ("deferred", True, False, "slow_kv_tier"), ("deferred", False, True, ""),  # a cache or an adapter may be the reason
])  # fmt: skip
def test_requests_that_vllm_defers_wait_for_no_room(reason, asks_elsewhere, adapters, first):
    page = DeferringPage(reason, asks_elsewhere, adapters=adapters)
    if adapters:
        page.adapters.labels("4", "a", "b").set(1)
    lives = steady(100, every_s=0.4, queue_s=2.0)
    found = observed(lives, 40, lambda _: (4, 6, 0.2), {"ttft_ms": 500.0}, page).watched()
    assert [each.key for each in found.findings][:1] == ([first] if first else []), found.headline


@pytest.mark.parametrize(("batches", "is_cap"), [
    ((4, 4, 1, 3), True), ((2, 1), True), ((1,), True),
    ((1, 2, 3, 4, 5, 6, 7, 2, 3, 8), False),  # the largest one is an outlier
])  # fmt: skip
def test_a_small_batch_that_drains_at_times_stands_at_its_cap(batches, is_cap):
    lives = steady(100, every_s=0.4, queue_s=2.0)

    def gauges(second):
        return batches[int(second) // 2 % len(batches)], 6, 0.2

    keys = [each.key for each in observed(lives, 40, gauges, {"ttft_ms": 500.0}).watched().findings]
    assert (keys[:1] == ["batch_cap"]) == is_cap, keys


@pytest.mark.parametrize(("block", "prompts", "cached", "is_named"), [
    (1056, 400, 0, True), (2096, 900, 0, True),
    (16, 400, 0, False), (128, 100, 0, False),  # default sizes
    (512, 900, 0, False), (1056, 400, 100, False),  # a prompt fills a block; hits are counted
])  # fmt: skip
def test_blocks_that_no_prompt_fills_hold_nothing(block, prompts, cached, is_named):
    lives = steady(100, every_s=0.4, queue_s=1.0, prefill_s=0.8, prompt_tokens=prompts, cached_tokens=cached)
    page = VllmPage(block_size=block)
    found = observed(lives, 40, lambda second: (4 + second % 8, 3, 0.2), {"ttft_ms": 500.0}, page).watched()
    assert ([each.key for each in found.findings][:1] == ["prefix_sub_block"]) == is_named, found.headline
