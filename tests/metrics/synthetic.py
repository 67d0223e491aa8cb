"""Synthetic runs with a known truth: what was planted is what a diagnosis must find, and nothing else.

`synthetic_run(path, plant=...)` writes a run directory as a real run does (through the recorder, in segments), from a
simulated server. Every plant is one `Plant`: the change that makes it, and the truth that it stands for.
"""

import math
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sojourn.metrics.records import ClientRecord, SystemRecord
from sojourn.metrics.records.tables import SCHEMAS
from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.run.recorder import Recorder
from tests.metrics.simulated_server import MS, Arrival, Device, Records, S, Settings, SimulatedServer

CLOCK_START_NS = 1_000 * S  # monotonic clocks do not begin at zero
OBJECTIVES = [{"klass": "all", "ttft_ms": 400.0, "tpot_ms": 40.0, "e2e_ms": None, "source": "chosen for the tests"}]


@dataclass(frozen=True, slots=True)
class Klass:
    """A class of requests; lengths are lognormal around their median, and clipped to three times of it."""

    name: str = "chat"
    weight: float = 1.0
    prompt_tokens: int = 120
    output_tokens: int = 40
    spread: float = 0.4
    shared_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Plant:
    """What is planted, and what it is the truth of. `symptom` None: nothing is to be found."""

    rate_rps: float = 6.0
    arrival_cv: float = 1.0  # 0 is constant, 1 is Poisson, more is bursts
    rise: float = 1.0  # the last rate over the first: above 1 an exponential ramp of the same mean
    klasses: tuple[Klass, ...] = (Klass(),)
    device: Device = field(default_factory=Device)
    settings: Settings = field(default_factory=Settings)
    lag_ms: float = 0.0
    threads: int = 1
    failing_share: float = 0.0
    objectives: tuple[dict, ...] = ()  # OBJECTIVES by default
    symptom: str | None = None
    lifecycle: str | None = None
    kind: str | None = None
    state: str = "healthy"


def _degraded(symptom: str, lifecycle: str, kind: str, **changes) -> Plant:
    return Plant(symptom=symptom, lifecycle=lifecycle, kind=kind, state="degraded", **changes)


PLANTS: dict[str, Plant] = {
    "healthy": Plant(),
    "overload": replace(
        _degraded("high_ttft", "request", "capacity", rate_rps=60.0, settings=Settings(max_num_seqs=128)),
        state="overloaded",
    ),
    # No larger batch would serve 60 requests a second either: the cap is what shows, not what is wrong.
    "overload_behind_cap": replace(_degraded("high_ttft", "request", "capacity", rate_rps=60.0), state="overloaded"),
    "tiny_kv": _degraded(
        "vram_fills_quickly", "memory", "policy", rate_rps=11.0, settings=Settings(num_kv_blocks=64)
    ),
    "long_beside_chat": _degraded(
        "high_itl", "request", "policy", rate_rps=4.0,
        klasses=(Klass(weight=0.85), Klass("document", 0.15, prompt_tokens=3000, output_tokens=16, spread=0.1)),
        settings=Settings(max_num_batched_tokens=4096),
        objectives=(
            {"klass": "chat", "ttft_ms": 2_000.0, "tpot_ms": 25.0, "e2e_ms": None, "source": "chosen for the tests"},
            {"klass": "document", "ttft_ms": 8_000.0, "source": "chosen for the tests"},
        ),
    ),
    # As in the scenario of that name: the pair arrives together, so that half of all prompts are long.
    "documents_beside_as_many_chats": _degraded(
        "high_itl", "request", "policy", rate_rps=2.0,
        klasses=(Klass(weight=0.5), Klass("document", 0.5, prompt_tokens=3000, output_tokens=16, spread=0.1)),
        settings=Settings(max_num_batched_tokens=4096),
        objectives=(
            {"klass": "chat", "ttft_ms": 4_000.0, "tpot_ms": 25.0, "e2e_ms": None, "source": "chosen for the tests"},
            {"klass": "document", "ttft_ms": 20_000.0, "source": "chosen for the tests"},
        ),
    ),
    "small_batch_cap": _degraded("high_ttft", "request", "policy", rate_rps=11.0, settings=Settings(max_num_seqs=4)),
    # Eight at a time would do, but each batch waits for its longest answer.
    "static_batching": _degraded(
        "high_ttft", "request", "policy", rate_rps=2.0, settings=Settings(policy="static"),
    ),
    "prefix_cache_off": _degraded(
        "high_ttft", "memory", "policy", rate_rps=3.6, klasses=(Klass(prompt_tokens=80, shared_tokens=960),),
        settings=Settings(prefix_caching=False),
    ),
    "slow_host": _degraded("low_device_utilisation", "compute", "fault", device=Device(host_ns=45 * MS)),
    "slow_device": _degraded("high_itl", "compute", "fault", device=Device(slowdown=4.0, slow_from=0.25)),
    "slow_stream": _degraded("high_ttft", "request", "fault", device=Device(chunk_ns=4_300_000)),
    "slow_encode": _degraded("high_ttft", "token", "fault", device=Device(encode_ns=500 * MS)),
    "slow_network": _degraded("high_ttft", "client", "client", device=Device(network_ns=300 * MS)),
    "slow_model": _degraded("high_itl", "compute", "capacity", rate_rps=0.5, device=Device(step_ns=60 * MS)),
    "small_budget": _degraded(
        "high_ttft", "request", "policy", rate_rps=10.0, settings=Settings(max_num_batched_tokens=16)
    ),
    "burst": _degraded("high_ttft", "request", "workload", rate_rps=8.0, arrival_cv=5.0),
    "client_lag": Plant(lag_ms=300.0, state="invalid", symptom=None, lifecycle="client", kind="client"),
}  # fmt: skip

# Two runs each: the first one, and the one it is held against.
PAIRS: dict[str, tuple[Plant, Plant]] = {
    # The host prepares steps one after the other; twice the threads only shorten what the device does.
    "devices_do_not_help": (
        Plant(rate_rps=5.0, device=Device(host_ns=30 * MS, step_ns=6 * MS, token_ns=100_000), threads=2),
        Plant(rate_rps=5.0, device=Device(host_ns=30 * MS, step_ns=3 * MS, token_ns=50_000), threads=4),
    ),
    "devices_help": (
        Plant(rate_rps=5.0, device=Device(step_ns=24 * MS, token_ns=400_000), threads=2),
        Plant(rate_rps=5.0, device=Device(step_ns=6 * MS, token_ns=100_000), threads=8),
    ),
    # The benchmark sends at a constant rate; the product sends as many requests in bursts.
    "benchmark_good_product_bad": (Plant(arrival_cv=0.0), Plant(arrival_cv=5.0)),
}


def synthetic_run(
    path: Path | str,
    *,
    plant: str | Plant | None = "healthy",
    seed: int = 0,
    device_seed: int | None = None,
    requests: int = 200,
    name: str = "synthetic",
    objectives: list[dict] | None = None,
    compact: bool = True,
    keep: Callable[[Records], None] | None = None,
) -> RunDirectory:
    """Simulates `requests` requests and writes them as a run directory.

    `plant` is a name of PLANTS, a Plant, or None for the healthy server. `compact=False` leaves segments, as in a run
    that is still going on; `device_seed` draws other noise for the same requests; `keep` may take records away before
    they are written. A run that this process has written before is copied.
    """
    chosen = plant if isinstance(plant, Plant) else PLANTS[plant or "healthy"]
    noise = seed if device_seed is None else device_seed
    document = run_document(chosen, name, seed, requests, objectives or list(chosen.objectives) or OBJECTIVES)
    simulation = (chosen, seed, noise, requests, name)
    if keep is not None:
        return _write(path, document, simulation, compact, keep)
    key = repr((simulation, document, compact))
    if key not in _written:
        _written[key] = _write(Path(_FOLDER.name) / str(len(_written)), document, simulation, compact).path
    shutil.copytree(_written[key], path, dirs_exist_ok=True)
    return RunDirectory(path)


_FOLDER = TemporaryDirectory(prefix="synthetic-runs-")
_written: dict[str, Path] = {}


def _write(
    path: Path | str,
    document: dict,
    simulation: tuple[Plant, int, int, int, str],
    compact: bool,
    keep: Callable[[Records], None] = lambda records: None,
) -> RunDirectory:
    plant, seed, noise, requests, name = simulation
    random = np.random.default_rng(seed)
    records = SimulatedServer(schedule(plant, requests, random), plant.settings, plant.device, noise, name).run()
    _fail_some(records, plant.failing_share, random)
    keep(records)
    run = RunDirectory.create(path, document)
    recorder = Recorder(run.path, ("client", "steps", "requests", "system"))
    system = [_system(second, records) for second in range(_seconds(records) + 1)]
    tables = {"client": records.client, "requests": records.requests, "system": system}
    if records.steps:
        recorder.extend("steps", records.steps)
    for table, rows in tables.items():
        for row in rows:
            recorder.append(table, row)
    recorder.close()
    if compact:
        run.compact()
    return run


def synthetic_pair(path: Path | str, *, pair: str, seed: int = 0, requests: int = 200) -> tuple[RunDirectory, ...]:
    """Both runs of a pair of PAIRS, in the order in which `diagnose(first, against=second)` takes them."""
    return tuple(
        synthetic_run(Path(path) / str(place), plant=plant, seed=seed, requests=requests, name=f"{pair}-{place}")
        for place, plant in enumerate(PAIRS[pair])
    )


def schedule(plant: Plant, requests: int, random: np.random.Generator) -> list[Arrival]:
    """When, which class, how many tokens. Gaps are Gamma distributed with the plant's coefficient of variation."""
    mean_gap = 1 / plant.rate_rps
    shape = 1 / max(plant.arrival_cv, 1e-3) ** 2
    due = np.cumsum(random.gamma(shape, mean_gap / shape, requests))
    due *= requests * mean_gap / due[-1]  # the offered rate is what the plant says, in each seed
    if plant.rise > 1:
        due = due[-1] * np.log1p(due / due[-1] * (plant.rise - 1)) / math.log(plant.rise)
    weights = np.array([klass.weight for klass in plant.klasses])
    chosen = random.choice(len(plant.klasses), requests, p=weights / weights.sum())
    return [
        _arrival(plant, index, plant.klasses[chosen[index]], due[index], random) for index in range(requests)
    ]  # fmt: skip


def _arrival(plant: Plant, index: int, klass: Klass, due_s: float, random: np.random.Generator) -> Arrival:
    def length(median: int) -> int:
        return int(np.clip(median * random.lognormal(0, klass.spread), 2, 3 * median))

    return Arrival(
        request_id=f"r{index:05d}", klass=klass.name, due_ns=CLOCK_START_NS + int(due_s * S),
        prompt_tokens=klass.shared_tokens + length(klass.prompt_tokens), output_tokens=length(klass.output_tokens),
        shared_tokens=klass.shared_tokens, lag_ns=int(random.exponential(plant.lag_ms) * MS),
    )  # fmt: skip


def run_document(plant: Plant, name: str, seed: int, requests: int, objectives: list[dict]) -> dict:
    """`run.json` as a real run writes it."""
    settings, usual = asdict(plant.settings), asdict(Settings())
    chosen = {"model": "simulated", "threads": plant.threads}
    chosen |= {name: value for name, value in settings.items() if value != usual[name]}
    told = {"device": "cpu", "dtype": "float32"} | settings | chosen
    late = [f"the load generator sent late by {plant.lag_ms:g} ms on average"] if plant.lag_ms else []
    process = "constant" if plant.arrival_cv == 0 else "poisson" if plant.arrival_cv == 1 else "gamma"
    classes = [
        {"klass": k.name, "weight": k.weight, "prompt_tokens": k.prompt_tokens + k.shared_tokens,
         "output_tokens": k.output_tokens, "shared_prefix_tokens": k.shared_tokens}
        for k in plant.klasses
    ]  # fmt: skip
    return {
        "scenario": {
            "name": name,
            "engine": chosen,
            "arrivals": {"process": process, "rate_rps": plant.rate_rps, "cv": plant.arrival_cv, "count": requests},
            "workload": {"classes": classes},
            "objectives": objectives,
            "measure": {"warmup_s": 0.0},
        },
        "seed": seed,
        "engine": chosen | {"served": {"id": "simulated", "engine": told}},
        "command": ["sojourn", "run", name, "--seed", str(seed)],
        "hardware": {"device": "simulated", "step_ns": plant.device.step_ns, "token_ns": plant.device.token_ns},
        "versions": {"simulated_server": "1"},
        "wall_anchor": {"monotonic_ns": CLOCK_START_NS, "unix_ns": 1_760_000_000 * S},
        "objectives": objectives,
        "client_error": None,
        "valid": not late,
        "invalid_reasons": late,
    }


def _fail_some(records: Records, share: float, random: np.random.Generator) -> None:
    """Makes a share of the client's records failures: the connection broke before the first byte."""
    for index, record in enumerate(records.client):
        if random.random() < share:
            records.client[index] = _failed(record)


def _failed(record: ClientRecord) -> ClientRecord:
    return msgspec.structs.replace(
        record, status="error", error="connection reset", first_token_ns=None, last_byte_ns=None, chunk_ns=[],
        chunk_tokens=[], output_tokens=None,
    )  # fmt: skip


def with_steal(run: RunDirectory, *percent: float) -> RunDirectory:
    """The run, whose samples of the machine say these, in turns."""
    rows = run.table("system").sort_values("ns", ignore_index=True)
    rows["host_steal_percent"] = [percent[place % len(percent)] for place in range(len(rows))]
    pq.write_table(pa.Table.from_pandas(rows, SCHEMAS["system"], preserve_index=False), run.path / "system.parquet")
    return run


def _seconds(records: Records) -> int:
    return int((records.steps[-1].end_ns - records.steps[0].begin_ns) / S) if records.steps else 0


def _system(second: int, records: Records) -> SystemRecord:
    """What a sensor would read: the core is busy as long as its steps are."""
    start = records.steps[0].begin_ns if records.steps else CLOCK_START_NS
    begin, end = start + second * S, start + (second + 1) * S
    busy = sum(
        max(0, min(step.end_ns, end) - max(step.begin_ns, begin))
        for step in records.steps
        if step.end_ns > begin and step.begin_ns < end
    )
    return SystemRecord(
        ns=end, host_cpu_percent=50 * busy / S, front_cpu_percent=8.0, core_cpu_percent=100 * busy / S,
        core_rss_bytes=400 << 20, host_available_bytes=8 << 30,
    )  # fmt: skip
