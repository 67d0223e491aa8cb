"""What a page shows beside a cause's own signs refutes it: the cause goes, and the reason is told."""

from dataclasses import replace

import msgspec
import pandas as pd
import pytest

from sojourn.diagnosis.causes import CAUSES
from sojourn.diagnosis.evidence import Means
from sojourn.diagnosis.evidence.read import read_evidence
from sojourn.diagnosis.excess import losses
from sojourn.diagnosis.proposals import proposals, ruled_out
from tests.metrics.foreign import VllmPage, foreign_run, steady
from tests.metrics.live_pages import observed

SLO = {"ttft_ms": 500.0}
WAITING = dict(every_s=0.4, queue_s=2.0)


def test_each_rule_of_means_says_what_would_refute_it():
    rules = {cause.key: cause.reads[Means] for cause in CAUSES.values() if Means in cause.reads}
    assert {key for key, rule in rules.items() if not rule.refuted_by} == set()
    assert len(rules) >= 6


@pytest.mark.parametrize(
    ("key", "kv_use", "changed", "why"),
    [
        ("batch_cap", 0.2, {"preemptions": 2}, "preemptions"),
        ("overload", 0.2, {"preemptions": 2}, "preemptions"),
        ("overload", 0.2, {}, "hardly a request waits now"),
        ("kv_pool", 0.99, {}, "hardly a request waits now"),
    ],
)
def test_what_contradicts_a_cause_drops_it_and_is_told(key, kv_use, changed, why):
    running, until = 64 if key == "overload" else 4, 99 if changed else 20
    named = observed(steady(100, **WAITING), 40, lambda _: (running, 6, kv_use), SLO).watched()
    assert key in [each.key for each in named.findings]
    lives = steady(100, **WAITING, **changed)
    found = observed(lives, 40, lambda second: (running, 6 * (second < until), kv_use), SLO).watched()
    assert key not in [each.key for each in found.findings]
    assert any(why in sentence for sentence in found.ruled_out), found.ruled_out


@pytest.mark.parametrize("tokens", [100, 1900])
def test_lengths_of_prompts_refute_steps_with_long_prompts(tokens):
    """Gaps of 20 ms and of 200 ms, and most of what is computed is prompts: long ones, or none."""
    chat = steady(60, every_s=0.5, decode_s=0.4)
    slowed = [replace(each, decode_s=6.0, prompt_tokens=tokens) for each in steady(20, every_s=1.5)]
    found = observed(chat + slowed, 40, lambda _: (4, 0, 0.2), {"tpot_ms": 50.0}).watched()
    assert ([each.key for each in found.findings] == ["token_budget_large"]) == (tokens > 512)
    assert any("at most 100 tokens" in each for each in found.ruled_out) == (tokens == 100)


@pytest.mark.parametrize("generates", [False, True])
def test_an_engine_that_generates_while_no_client_hears_anything_does_not_hang(tmp_path, generates):
    facts = read_evidence(foreign_run(tmp_path / "run", steady(60, every_s=1.0), VllmPage()), "metrics")
    rows = facts.rows.copy()
    lost = rows.index[20:]
    rows.loc[lost, ["status", "error"]] = "error", "no complete reply within target.timeout_s, 40 s"
    rows.loc[lost, "first_token_ns"] = pd.NA
    rows.loc[lost, "last_byte_ns"] = rows.loc[lost, "due_ns"] + 40 * 10**9
    seen = facts.server.courses.generated_ns  # 40 s after the last answer that a client heard of
    heard = int(rows.last_byte_ns[rows.index[:20]].max())
    assert seen - heard > 30e9
    courses = msgspec.structs.replace(facts.server.courses, generated_ns=seen if generates else heard)
    found = replace(facts, rows=rows, server=msgspec.structs.replace(facts.server, courses=courses))
    (loss,) = losses(found)
    assert ("engine_stall" in [each.key for each in proposals(found, loss)]) == (not generates)
    assert any("the engine generated tokens" in each for each in ruled_out(found, [loss])) == generates
    unseen = replace(found, server=None)  # a client alone: nothing refutes it
    assert "engine_stall" in [each.key for each in proposals(unseen, loss)]
