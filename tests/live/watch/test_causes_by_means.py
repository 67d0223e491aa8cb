"""Causes that one page of vLLM shows, planted in a simulated one: named from some severity on, and silent below."""

import pytest

from tests.live.watch.simulated_vllm import Device, Load
from tests.live.watch.test_simulated import said

ROWS_COST = Device(step_s=0.012, prompt_token_s=0.0001, decode_s=0.0012)
ROWS_ARE_FREE = Device(step_s=0.02, prompt_token_s=0.00005, decode_s=0.00001)
LONG_PROMPTS = Device(step_s=0.012, prompt_token_s=0.0006, decode_s=0.0005)
RISING = (Load(2.5), Load(1, 20))
RETRIEVAL = (Load(2, prompt_tokens=600, output_tokens=20),)
DRAFTS, TIER = dict(loads=RISING, device=ROWS_COST, drafts=4), dict(loads=RETRIEVAL, device=LONG_PROMPTS)
# Cause → server, objectives, what its sentence says; "" for a server that must not be blamed for it
PLANTED = {
    "rejected_drafts": [
        (DRAFTS | dict(accepted=0.05), {"tpot_ms": 25.0}, "1% of the drafts were accepted"),
        (DRAFTS | dict(accepted=0.15), {"tpot_ms": 25.0}, "gives 1.2 tokens"),
        (DRAFTS | dict(accepted=0.05, loads=(Load(8),)), {"ttft_ms": 1000.0}, "which costs up to 79%"),
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
}  # fmt: skip
CASES = [(key, *case) for key, cases in PLANTED.items() for case in cases]


@pytest.mark.parametrize(("key", "settings", "objectives", "words"), CASES,
                         ids=[f"{key} {number}" for number, (key, *_) in enumerate(CASES)])  # fmt: skip
def test_a_planted_cause_is_named_where_it_costs_time_and_nowhere_else(key, settings, objectives, words):
    found = said(settings, 45, 0, objectives)[1].watched().findings
    assert (key in [each.key for each in found[:1]]) == bool(words), found
    assert words in next((each.cause for each in found), ""), found
    assert all(each.probe.measurement and each.probe.rival for each in found)
