"""What `size` says of a recorded server's other loads, given the steps of one of its runs, beside what was measured."""

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from sojourn.metrics.request.goodput import measured
from sojourn.metrics.run.directory import RunDirectory, section, server_hardware
from sojourn.replay.device.estimate import Deployment
from sojourn.replay.device.simulate import server_config
from sojourn.replay.sizing.limit import Server
from sojourn.replay.sizing.load import recorded_load_of
from sojourn.replay.sizing.recorded import recorded_server

FILE = Path(__file__).with_name("agreement.json")


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Latencies are ms."""

    server: str
    steps_of: str  # the run whose steps were given, in words
    load: str
    rate_rps: float
    date: str
    machine: str
    requests: int
    measured_tpot_ms: dict[str, float]
    said_tpot_ms: dict[str, float]
    measured_tokens_per_s: float
    said_tokens_per_s: float

    @property
    def tpot_error(self) -> float:
        return self.said_tpot_ms["p50"] / self.measured_tpot_ms["p50"] - 1

    @property
    def capacity_ratio(self) -> float:
        return self.said_tokens_per_s / self.measured_tokens_per_s


def agree(paths: Sequence[Path]) -> list[Agreement]:
    """Of the first run's steps, on the load of each run."""
    first = RunDirectory.open(paths[0])
    deployment = Deployment(model="recorded", device="recorded")
    estimate, settings = recorded_server(first, deployment)
    return [_agreement(first, RunDirectory.open(path), estimate, settings) for path in paths]


def _agreement(first: RunDirectory, run: RunDirectory, estimate, settings: dict) -> Agreement:
    meta, load = run.meta(), recorded_load_of(run)
    rows = measured(run.requests(), meta)
    rows = rows[rows.status == "ok"]
    span_s = (float(rows.last_byte_ns.max()) - float(rows.due_ns.min())) / 1e9
    server = Server(estimate, server_config(estimate, **settings), load, None, at_a_time=math.inf)
    said = server.at_slots(load.slots) if load.slots is not None else server.at_rate(load.rate_rps)
    wanted, tpot = {"p50": 0.5, "p90": 0.9}, rows.tpot_ms.astype(float)
    versions = section(meta, "server_versions") or section(meta, "versions")
    engine = "vllm" if "vllm" in versions else "sojourn"
    hardware = server_hardware(meta)
    began_s = section(meta, "wall_anchor").get("unix_ns", 0) / 1e9
    return Agreement(
        server=f"{engine} {versions.get(engine, '')}".strip(),
        steps_of="its own" if run.path == first.path else "the first run",
        load=f"prompts {load.mean_prompt:,.0f}, answers {load.mean_output:,.0f} tokens",
        rate_rps=load.rate_rps,
        date=datetime.fromtimestamp(began_s, UTC).strftime("%Y-%m-%d"),
        machine=f"{hardware.get('cpu', 'unknown')}, threads: {section(meta, 'core').get('threads', '?')}",
        requests=len(rows),
        measured_tpot_ms={name: float(tpot.quantile(at)) for name, at in wanted.items()},
        said_tpot_ms={name: said.tpot_ms[name] for name in wanted},
        measured_tokens_per_s=float(rows.output_tokens.astype(float).sum()) / span_s,
        said_tokens_per_s=said.output_tokens_per_s,
    )


def write_agreement(found: Sequence[Agreement]) -> None:
    """Adds to the file; a server's older figures are replaced."""
    kept = [each for each in read_agreement() if each.server not in {new.server for new in found}]
    FILE.write_bytes(msgspec.json.format(msgspec.json.encode([*kept, *found]), indent=1) + b"\n")


def read_agreement() -> list[Agreement]:
    return msgspec.json.decode(FILE.read_bytes(), type=list[Agreement]) if FILE.exists() else []
