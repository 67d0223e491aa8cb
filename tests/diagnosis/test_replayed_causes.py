"""Causes in the order of requests, decided by real replays of a simulated engine with the wrong order."""

import pytest

from sojourn.diagnosis.diagnose import diagnose
from sojourn.metrics.time_limit import TimeLimit
from sojourn.replay.predictor import predictor_of
from tests.replay.simulated_run import Ask, write_run

MS = 1_000_000
ROOMY = {"max_num_batched_tokens": 256, "num_blocks": 4096}
SOON = {"klass": "chat", "ttft_ms": 60.0, "source": "chosen for the test"}
STEADY = {"klass": "chat", "ttft_ms": 30.0, "tpot_ms": 2.4, "source": "chosen for the test"}  # no larger batch keeps it
PATIENT = {"klass": "bulk", "ttft_ms": 10_000.0, "source": "chosen for the test"}


def asked(klass: str, count: int, gap_ms: float, prompt: int, outputs: int, **more) -> list[Ask]:
    """Requests of one class at even gaps; no two prompts begin alike."""
    first = {"chat": 900_000, "bulk": 1_000}[klass]
    return [
        Ask(f"{klass}{at:03d}", round(at * gap_ms * MS), [first + 1_000 * at + place for place in range(prompt)],
            outputs, klass=klass, **more)
        for at in range(count)
    ]  # fmt: skip


def in_order(*groups: list[Ask]) -> list[Ask]:
    return sorted((ask for group in groups for ask in group), key=lambda ask: ask.due_ns)


CASES = {
    # Long prompts go first, whenever they came
    "scheduling_policy": (
        in_order(asked("chat", 40, 9.0, 8, 6, priority=9), asked("bulk", 16, 8.0, 240, 2)),
        {"policy": "priority", **ROOMY}, SOON,
    ),
    # One tenant's crowd at once; the other tenant sends one request after the other
    "tenant_share": (
        in_order(asked("chat", 40, 9.0, 8, 6, tenant="small"), asked("bulk", 90, 1.0, 8, 40, tenant="greedy")),
        {"max_num_seqs": 16}, STEADY,
    ),
}  # fmt: skip


@pytest.mark.parametrize("key", CASES)
def test_wrong_order_is_named_and_its_remedy_regains_what_was_lost(tmp_path, key):
    asks, settings, objective = CASES[key]
    run = write_run(tmp_path / "run", asks, objectives=[objective, PATIENT], **settings)
    diagnosis = diagnose(run, predictor=predictor_of(run))
    first = diagnosis.findings[0]
    assert first.key == key and first.kind == "policy" and not first.gain_is_estimate
    assert first.change.settings["policy"] != settings.get("policy", "fcfs") and first.goodput_gain > 0.2


def test_replay_that_takes_too_long_is_broken_off(tmp_path):
    """The clock of the limit goes on by a second whenever it is read: no replay ends, and there is a verdict."""
    asks, settings, objective = CASES["tenant_share"]
    run = write_run(tmp_path / "run", asks, objectives=[objective, PATIENT], **settings)
    ticks = iter(range(10_000))
    limit = TimeLimit(1.5, lambda: float(next(ticks)))
    diagnosis = diagnose(run, predictor=predictor_of(run, limit=limit), limit=limit)
    assert next(ticks) < 50 and diagnosis.findings and diagnosis.findings[0].gain_is_estimate
    assert "no replay fits into 1.5 s" in diagnosis.replay_refused and "--thorough" in diagnosis.left_out[0]
