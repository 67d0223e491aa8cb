"""Bundled scenarios keep their schedules: what was measured with one is comparable with what is measured tomorrow."""

import hashlib

import pytest

from sojourn.loadgen.prompts.bodies import build_wire_requests
from sojourn.loadgen.scenario.scenario import load_scenario
from sojourn.loadgen.schedule.build import build_schedule
from sojourn.loadgen.schedule.request import ScheduledRequest
from sojourn.loadgen.target.endpoint import parse_base_url

FIELDS = (
    "index", "request_id", "due_offset_ns", "klass", "tenant", "session_id", "turn", "prompt_tokens", "max_tokens",
    "shared_prefix", "shared_prefix_tokens", "temperature", "top_k", "top_p", "ignore_eos", "seed", "prelude",
    "priority",
)  # fmt: skip
# Number of requests, digest of the schedule (of the code before ramps, closed loops and sessions), digest of the bytes
# (of the code since no seed is sent unasked).
GOLDEN = {
    "burst": (857, "6fe64787fd9a79dc", "204a81cfbae34347"),
    "demo": (1110, "f813728ea2efe126", "8e37f4aae20ba195"),
    "kv-pressure": (260, "2f3a7a80a36fc0e8", "14660fff486a39bf"),
    "long-prompt-beside-chat": (26, "cdfeaeb473b30593", "8dd3f9715c0230e1"),
    "shared-system-prompt": (156, "cdcf6866b72c4cbb", "53e8fc47bf3d09bc"),
    "steady-chat": (83, "913e74921a183756", "b67a1ece1dbbafb7"),
}


def digest(parts) -> str:
    return hashlib.blake2b(b"\n".join(parts), digest_size=8).hexdigest()


def schedule_digest(schedule: list[ScheduledRequest]) -> str:
    return digest(repr([getattr(request, name) for name in FIELDS]).encode() for request in schedule)


@pytest.mark.parametrize("name", GOLDEN)
def test_schedule_and_bytes_of_a_bundled_scenario_stay_what_they_are(name, monkeypatch):
    monkeypatch.delenv("SOJOURN_API_KEY", raising=False)
    scenario = load_scenario(name)
    schedule = build_schedule(scenario, scenario.measure.seed, "golden")
    endpoint = parse_base_url("http://127.0.0.1:8000")
    wire = build_wire_requests(scenario, scenario.measure.seed, schedule[:200], endpoint, "golden")  # in words
    assert (len(schedule), schedule_digest(schedule), digest(wire.values())) == GOLDEN[name]
