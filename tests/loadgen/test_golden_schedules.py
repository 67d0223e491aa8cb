"""Bundled scenarios keep their schedules: what was measured with one is comparable with what is measured tomorrow."""

import hashlib

import pytest

from loadgen.bodies import build_wire_requests
from loadgen.endpoint import parse_base_url
from loadgen.scenario import load_scenario
from loadgen.schedule import ScheduledRequest, build_schedule

FIELDS = (
    "index", "request_id", "due_offset_ns", "klass", "tenant", "session_id", "turn", "prompt_tokens", "max_tokens",
    "shared_prefix", "shared_prefix_tokens", "temperature", "top_k", "top_p", "ignore_eos", "seed", "measured",
    "prelude", "priority",
)  # fmt: skip
# Of the code before ramps, closed loops and sessions: number of requests, digest of the schedule, digest of the bytes.
GOLDEN = {
    "burst": (857, "498695e40c2db27d", "3723640f6d959386"),
    "demo": (1110, "86d71305f7072a7a", "5a68013e459620aa"),
    "kv-pressure": (260, "8ecc40123e1f52d0", "d19f252d117152c4"),
    "long-prompt-beside-chat": (26, "3cf1ca3ebbfd8564", "d1578e05ce8f9278"),
    "shared-system-prompt": (156, "583dea3c1646e4f6", "2d7a44e81e7b41f7"),
    "steady-chat": (83, "36a7c1ecb90afcf4", "c5fdd558d65fef26"),
}


def digest(parts) -> str:
    return hashlib.blake2b(b"\n".join(parts), digest_size=8).hexdigest()


def schedule_digest(schedule: list[ScheduledRequest]) -> str:
    return digest(repr([getattr(request, name) for name in FIELDS]).encode() for request in schedule)


@pytest.mark.parametrize("name", GOLDEN)
def test_schedule_and_bytes_of_a_bundled_scenario_are_those_of_its_first_release(name, monkeypatch):
    monkeypatch.delenv("SOJOURN_API_KEY", raising=False)
    scenario = load_scenario(name)
    schedule = build_schedule(scenario, scenario.measure.seed, "golden")
    endpoint = parse_base_url("http://127.0.0.1:8000")
    wire = build_wire_requests(scenario, scenario.measure.seed, schedule[:200], endpoint, "golden")  # in words
    assert (len(schedule), schedule_digest(schedule), digest(wire)) == GOLDEN[name]
