"""Scenarios as tests want them, and replays without a process of their own."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sojourn.loadgen.client.dispatcher import LoadClient, Replay
from sojourn.loadgen.client.event_log import EventLog
from sojourn.loadgen.prompts.bodies import build_wire_requests
from sojourn.loadgen.record.parse import Parsed, build_client_table, read_records
from sojourn.loadgen.scenario.scenario import Scenario
from sojourn.loadgen.schedule.build import build_schedule
from sojourn.loadgen.schedule.request import save_schedule
from sojourn.loadgen.target.endpoint import parse_base_url
from sojourn.metrics.records import ClientRecord

CHAT = {"klass": "chat", "prompt_tokens": 8, "output_tokens": 5}
OBJECTIVE = {"ttft_ms": 500, "source": "made up for a test"}


def scenario(arrivals: dict | None = None, classes: list[dict] | None = None, **blocks: Any) -> Scenario:
    """A valid scenario of a few requests at once, with the given blocks replaced."""
    content = {
        "name": "test",
        "description": "a test",
        "arrivals": arrivals or {"process": "at_once", "count": 3},
        "workload": {"classes": classes or [CHAT]},
        "objectives": [OBJECTIVE],
    }
    return Scenario(**(content | blocks))


@dataclass(frozen=True)
class Replayed:
    records: list[ClientRecord]
    parsed: Parsed


def replay(chosen: Scenario, url: str, run_dir: Path, model: str = "scripted", id_prefix: str = "t") -> Replayed:
    """Sends a scenario from this process and parses what came back."""
    endpoint = parse_base_url(url)
    schedule = build_schedule(chosen, chosen.measure.seed, id_prefix)
    wire = build_wire_requests(chosen, chosen.measure.seed, schedule, endpoint, model)
    loop = chosen.arrivals.closed_loop
    client = LoadClient(Replay(schedule, wire, endpoint, chosen.target, run_dir, loop), lambda *_: None)
    save_schedule(run_dir, schedule, chosen)
    client.run()
    return replayed(run_dir)


def replayed(run_dir: Path) -> Replayed:
    parsed = build_client_table(run_dir)
    return Replayed(read_records(run_dir), parsed)


def log_of(events: list[tuple[int, int, int, bytes]]) -> EventLog:
    """Events (index, ns, kind, data) as the hot path records them."""
    log = EventLog()
    for event in events:
        log.add(*event)
    return log
