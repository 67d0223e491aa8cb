"""What a client's own records hint at: each trace names its usual cause, and a run without a trace names none."""

import numpy as np
import pytest

from sojourn.diagnosis.client_signs import signs_of
from sojourn.diagnosis.diagnose import diagnose
from sojourn.diagnosis.evidence import read_evidence
from sojourn.diagnosis.verdict import tell_confidence
from sojourn.metrics.records import ClientRecord
from sojourn.metrics.records.tables import row
from sojourn.metrics.run.directory import REQUIRED, RunDirectory
from sojourn.metrics.run.segments import write_segment

S, MS, START_NS = 1_000_000_000, 1_000_000, 1_000_000_000_000
OBJECTIVES = [{"klass": "all", "ttft_ms": 200.0, "tpot_ms": 20.0, "source": "chosen for the tests"}]
COUNT = 60
EVEN = np.full(30, 8.0)  # gaps in ms, well within the objective
SLOW = np.full(30, 26.0)
STALLED = np.where(np.arange(30) % 10 == 5, 400.0, 8.0)  # a long gap, after which text goes on at its pace
HELD = np.where(np.arange(30) % 10 == 5, 400.0, np.where(np.arange(30) % 10 > 5, 0.01, 8.0))  # ... comes at once
RANDOM = np.random.default_rng(3)
PROMPTS = RANDOM.integers(50, 900, COUNT)


def request(number: int, ttft_ms: float, gaps=EVEN, lag_ms: float = 1.0, error: str | None = None) -> ClientRecord:
    due = START_NS + number * 250 * MS
    first = due + int(ttft_ms * MS)
    stamps = [first, *(first + np.cumsum(gaps * MS).astype(int))]
    if error is not None:
        return ClientRecord(f"r{number}", "client", due, "error", sent_ns=due + MS, last_byte_ns=first, error=error)
    return ClientRecord(f"r{number}", "client", due, "ok", klass="chat", sent_ns=due + int(lag_ms * MS),
                        first_token_ns=first, last_byte_ns=int(stamps[-1]), prompt_tokens=int(PROMPTS[number]),
                        output_tokens=len(stamps), chunk_ns=[int(ns) for ns in stamps],
                        chunk_tokens=[1] * len(stamps))  # fmt: skip


def client_run(path, records) -> RunDirectory:
    meta = dict.fromkeys(REQUIRED) | {"scenario": "client", "seed": 0, "engine": {}, "objectives": OBJECTIVES,
                                      "valid": True, "command": ["sojourn", "load", "client"]}  # fmt: skip
    run = RunDirectory.create(path, meta)
    write_segment(run.path, "client", [row(record) for record in records], "0")
    return run


def ramp(number: int) -> float:
    return 60.0 + 40.0 * number


# name → one request by its number, and the cause that it hints at with its first lifecycle
TRACES = {
    "queue_of_slow_tokens": (lambda n: request(n, ramp(n), np.full(30, 15.0)), "overload", "request"),
    "queue_of_fast_tokens": (lambda n: request(n, ramp(n)), "batch_cap", "request"),
    "first_token_goes_with_prompt": (lambda n: request(n, 0.6 * PROMPTS[n]), "own_prefill", "compute"),
    "same_for_everybody": (lambda n: request(n, 230.0 + RANDOM.normal(0, 5)), "slow_network", "client"),
    "text_held_back": (lambda n: request(n, 60.0, HELD), "blocked_front", "request"),
    "long_steps_between": (lambda n: request(n, 60.0, STALLED), "token_budget_large", "request"),
    "each_token_late": (lambda n: request(n, 60.0, SLOW), "slow_decode", "compute"),
    "sent_late": (lambda n: request(n, 400.0, lag_ms=360.0), "starved_load_generator", "client"),
    "refused": (lambda n: request(n, 60.0, error="HTTP 429: the queue is full" if n % 2 else None), "queue_limit",
                "request"),
    "limited": (lambda n: request(n, 60.0, error="HTTP 429: tenant a has reached 2 requests" if n % 2 else None),
                "rate_limit", "request"),
    "failed": (lambda n: request(n, 60.0, error="HTTP 503: the core died" if n % 2 else None), "core_death",
               "request"),
}  # fmt: skip


@pytest.mark.parametrize("trace", TRACES)
def test_trace_names_its_usual_cause(trace, tmp_path):
    make, key, lifecycle = TRACES[trace]
    diagnosis = diagnose(client_run(tmp_path / "run", [make(n) for n in range(COUNT)]), level="client")
    first = diagnosis.findings[0]
    assert (first.key, first.lifecycles[0]) == (key, lifecycle)
    assert diagnosis.state == ("overloaded" if key == "overload" else "degraded")
    assert "above 0 ms" not in first.probe.if_cause
    assert ("of the failures" in tell_confidence(first)) == first.objective.startswith("served"), "late is not failed"


# What requests end with, and the first cause then: one error that has a cause, one that has none at this level
@pytest.mark.parametrize(("error", "key"), [("HTTP 500: EngineCore died", "core_death"),
                                            ("timeout: no byte in 9 s", None),
                                            ("HTTP 429: the queue is full", "queue_limit")])  # fmt: skip
@pytest.mark.parametrize(("failed", "late"), [(50, 8), (31, 29), (10, 50), (6, 54)])
def test_headline_is_about_what_most_requests_suffer(error, key, failed, late, tmp_path):
    """A core that died is not the second finding of a run whose others were late, and a failure without a known cause
    is not hidden by a slowness with one."""
    order = np.random.default_rng(1).permutation(COUNT)
    kinds = {number: "failed" if place < failed else "late" if place < failed + late else ""
             for place, number in enumerate(order)}  # fmt: skip
    records = [request(n, 0.0, error=error) if kinds[n] == "failed" else request(n, 60.0, SLOW if kinds[n] else EVEN)
               for n in range(COUNT)]  # fmt: skip
    diagnosis = diagnose(client_run(tmp_path / "run", records), level="client")
    says_failed = f"{failed / COUNT:.0%} of the requests failed" in diagnosis.headline
    assert diagnosis.state == "degraded" and says_failed is (failed > late)
    assert not says_failed or error in diagnosis.headline or diagnosis.findings[0].key == key


def test_without_a_trace_nothing_is_named(tmp_path):
    healthy = diagnose(client_run(tmp_path / "healthy", [request(n, 60.0) for n in range(COUNT)]), level="client")
    assert healthy.state == "healthy" and not healthy.findings
    chance = [request(n, 60.0 if n % 3 else 900.0) for n in range(COUNT)]
    odd = diagnose(client_run(tmp_path / "odd", chance), level="client")
    assert odd.state == "inconclusive" and not odd.findings


def test_signs_are_those_of_the_records(tmp_path):
    requests = [request(n, ramp(n), STALLED) for n in range(COUNT)]
    growing = signs_of(read_evidence(client_run(tmp_path / "run", requests)))
    first, last = np.median([ramp(n) for n in range(12)]), np.median([ramp(n) for n in range(48, 60)])
    assert growing.growth == pytest.approx((last - first) / np.mean([ramp(n) for n in range(COUNT)]))
    assert growing.stalled == pytest.approx(1200 / (1200 + 27 * 8), abs=0.01) and growing.clumped == 0.0
    assert growing.gap_ms == pytest.approx(8.0) and abs(growing.with_prompt) < 0.4
    few = signs_of(read_evidence(client_run(tmp_path / "few", [request(n, ramp(n)) for n in range(8)])))
    assert few.growth is None and few.with_prompt is None
