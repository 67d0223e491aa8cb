"""The facts of a run, computed once from its records; every number of a diagnosis comes from here."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal

import numpy as np
import pandas as pd

from sojourn.diagnosis.chunk_facts import Chunks, chunks_of
from sojourn.diagnosis.evidence_level import Level, seen
from sojourn.diagnosis.fleet_facts import FleetFacts, fleet_facts
from sojourn.diagnosis.kv_facts import KvFacts, kv_facts
from sojourn.diagnosis.launch_facts import Launches, launches_of
from sojourn.diagnosis.machine_facts import MachineFacts, machine_facts
from sojourn.diagnosis.memory_facts import PrefixUse, prefix_use
from sojourn.diagnosis.step_facts import StepFacts, step_facts
from sojourn.diagnosis.verdict import Closure
from sojourn.interop.sources.gain import gain_of_run
from sojourn.interop.sources.view import ServerView, observe
from sojourn.metrics.compute.group_facts import GroupFacts, group_facts
from sojourn.metrics.compute.speed_facts import SpeedFacts, speed_facts
from sojourn.metrics.ledger import ACCOUNTS, LIFECYCLES, UNACCOUNTED, closes
from sojourn.metrics.machine.steal import Steal, steal_within
from sojourn.metrics.request.goodput import judged, measured, measured_steps, window_ns
from sojourn.metrics.request.objectives import objectives_of
from sojourn.metrics.request.offenders import Book, TooLarge, book_of
from sojourn.metrics.request.waits import reasons
from sojourn.metrics.results.load import is_closed
from sojourn.metrics.run.directory import RunDirectory, engine_settings, section, server_hardware
from sojourn.metrics.run.fleet import servers_of, siblings_of
from sojourn.metrics.run.server_alone import is_server_alone, meta_of, requests_of

VARIED = 1.5  # coefficient of variation of the gaps; Poisson arrivals have 1, and 200 of them stay below 1.3
MOST_STRETCHES, STRETCH_GAPS = 8, 25  # of a run, each with at least so many gaps
FEWEST_FOR_A_RATE = 10  # requests: a rate of fewer is good to a third at best
UNDER_WAY = "step"  # of a request's waits: it came while a step was computed, which no setting could have spared it


@dataclass(frozen=True, slots=True)
class Facts:
    """One run in numbers. `rows` is `goodput.judged` of the measured requests."""

    name: str
    path: str
    scenario: str
    meta: dict[str, Any]
    objectives: list[dict[str, Any]]
    engine: dict[str, Any]  # the settings in force, as far as they are known
    chosen: frozenset[str]  # the settings that the scenario or the command line names; the others are defaults
    rows: pd.DataFrame
    steps: StepFacts | None
    sent: int
    served: int
    errors: dict[str, int]  # of the requests that were not served: what they ended with → how many
    joined: int  # served requests that have a server record
    offered_rps: float  # NaN where all requests were due at once: such a run offers no rate
    arrivals: "Arrivals | None"  # None for fewer than three requests, and in a closed loop
    lag_p90_ms: float | None
    device_busy: float | None  # share of the time with a request in the server in which the device worked
    declared_shared_share: float  # of the prompt tokens, what the scenario says is alike between requests
    cached_share: float | None  # of the prompt tokens, what came from the prefix cache
    work: "Work | None"
    waits: dict[str, float]  # reason → share of the waiting for a place; what a step under way cost is left out
    prefix: PrefixUse | None  # of the served requests; only where the server records it
    book: Callable[[], Book | None]  # which request delayed which; read at its first use
    server: ServerView | None = None  # what its own metrics show of a server that recorded nothing for us
    scraped: bool = False  # whether it had a /metrics at all
    level: Level = "all"  # what was read
    measured_by: Literal["client", "server"] = "client"  # whose stamps `rows` has; a server alone knows no network
    chunks: Chunks | None = None  # how prompts were cut; None without step records
    served_rps: float | None = None  # over the whole run: the server can do so much at least; None for a few requests
    steal: Steal | None = None  # None where nothing sampled the server's machine, or its kernel does not count
    speed: Callable[[], SpeedFacts | None] = lambda: None  # against normal speed; worked out at its first use
    machine: MachineFacts | None = None  # who had the CPUs
    launches: Launches | None = None  # of a GPU
    kv: Callable[[], KvFacts | None] = lambda: None  # blocks and prefix cache; worked out at its first use
    group: Callable[[], GroupFacts | None] = lambda: None  # of several ranks; worked out at its first use
    fleet: Callable[[], FleetFacts | None] = lambda: None  # of several servers; worked out at its first use
    servers: Mapping[str, Callable[[], "Facts"]] = field(default_factory=dict)  # of a fleet: each by itself
    batch_gain: float | None = None  # tokens/s of twice the batch over those of the batch; None: not seen

    @property
    def token_budget(self) -> int | None:
        """Tokens that a step may hold: the setting, or what most steps had where the server chooses it."""
        setting = self.engine.get("max_num_batched_tokens")
        if isinstance(setting, int):
            return setting
        return int(self.steps.budget_p50) or None if self.steps is not None else None


@dataclass(frozen=True, slots=True)
class Arrivals:
    """How the gaps between due times vary: `cv` over the whole run, `local_cv` around the mean gap of the stretch that
    they are in. Bursts are in both; a rate that rises or has peaks is in `cv` alone."""

    cv: float
    local_cv: float
    peak_rps: float  # of the busiest stretch

    @property
    def varied(self) -> bool:
        return self.cv >= VARIED

    @property
    def bursty(self) -> bool:
        return self.varied and self.local_cv >= VARIED


@dataclass(frozen=True, slots=True)
class Work:
    """What one request asks of the device, on average over the served requests."""

    prompt_tokens: float
    computed_tokens: float  # of the prompt, not from the cache and not counted again after a preemption
    output_tokens: float
    context_tokens: float  # mean context of a decode step of one request


def read_facts(run: RunDirectory, level: Level = "all") -> Facts:
    """Reads the tables of a run that a level allows. Empty tables, missing tables and a run under way are all fine."""
    run = seen(run, level)
    meta = meta_of(run)
    objectives = meta.get("objectives") or []
    requests = requests_of(run, run.meta())
    rows = judged(measured(requests, meta), objectives)
    steps, system = measured_steps(run.table("steps"), rows), run.table("system")
    found = step_facts(steps)
    span = window_ns(rows)
    served = rows[rows.status == "ok"]
    unserved = rows[rows.status != "ok"]
    gaps = np.diff(np.sort(rows.due_ns.to_numpy(dtype="float64"))) if len(rows) > 2 else np.array([])
    own_gaps = len(gaps) > 2 and not is_closed(meta)  # in a closed loop they are the server's too
    lag = (rows.sent_ns.astype("float64") - rows.due_ns.astype("float64")).dropna() / 1e6
    joined = int(served.arrived_ns.notna().sum())
    scenario = meta.get("scenario")
    chosen = meta.get("engine") if isinstance(meta.get("engine"), dict) else {}
    return Facts(
        name=run.name,
        path=str(run.path),
        scenario=str(scenario.get("name", "SCENARIO")) if isinstance(scenario, dict) else str(scenario or "SCENARIO"),
        meta=meta,
        objectives=objectives,
        engine=engine_settings(meta),
        chosen=frozenset(name for name, value in chosen.items() if name != "served" and value is not None),
        rows=rows,
        steps=found,
        sent=len(rows),
        served=len(served),
        errors={str(name): int(n) for name, n in unserved.error.fillna(unserved.status).value_counts().items()},
        joined=joined,
        offered_rps=float(len(gaps) / (gaps.sum() / 1e9)) if gaps.sum() > 0 else math.nan,
        arrivals=_arrivals(gaps) if own_gaps and gaps.mean() > 0 else None,
        lag_p90_ms=float(lag.quantile(0.9)) if len(lag) else None,
        device_busy=_device_busy(rows, steps),
        declared_shared_share=_declared_shared_share(meta),
        cached_share=_cached_share(served),
        work=_work(served),
        waits=_waits(rows, found),
        prefix=prefix_use(served),
        book=cache(lambda: _book(run)),
        server=observe(run, requests, rows) if not joined else None,
        scraped=bool(run.sources("scrapes")),
        batch_gain=gain_of_run(run) if not joined else None,
        level=level,
        measured_by="server" if is_server_alone(run, run.meta()) else "client",
        chunks=_chunks(steps, served, meta),
        served_rps=_served_rps(rows, served),
        steal=steal_within(system, *span) if span else None,
        speed=cache(lambda: speed_facts(meta, steps, rows)),
        machine=machine_facts(meta, system, steps, rows, span, _siblings(run, meta)),
        launches=launches_of(meta, steps),
        group=cache(lambda: group_facts(meta, steps)),
        fleet=cache(lambda: fleet_facts(run, rows, level)),
        servers={member.name: cache(partial(read_facts, member, level)) for member in servers_of(run)},
        kv=cache(
            lambda: (
                kv_facts(engine_settings(meta), section(meta, "core"), run.table("requests"), run.table("steps"))
                if joined
                else None
            )
        ),
    )


def _siblings(run: RunDirectory, meta: dict[str, Any]) -> list[pd.DataFrame]:
    """The samples of the fleet's other servers that ran on the same machine."""
    boot = server_hardware(meta).get("boot_id")
    return [
        member.table("system") for member in siblings_of(run, meta)
        if boot is not None and server_hardware(member.meta()).get("boot_id") == boot
    ]  # fmt: skip


def _arrivals(gaps_ns: np.ndarray) -> Arrivals:
    stretches = np.array_split(gaps_ns, np.clip(len(gaps_ns) // STRETCH_GAPS, 1, MOST_STRETCHES))
    around = np.concatenate([stretch / (stretch.mean() or 1.0) for stretch in stretches])
    return Arrivals(
        cv=float(gaps_ns.std() / gaps_ns.mean()), local_cv=float(around.std()),
        peak_rps=max(len(stretch) / (stretch.sum() / 1e9 or math.inf) for stretch in stretches),
    )  # fmt: skip


def _chunks(steps: pd.DataFrame, served: pd.DataFrame, meta: dict[str, Any]) -> Chunks | None:
    known = served[served.server_prompt_tokens.notna()]
    prompts = dict(zip(known.request_id, known.server_prompt_tokens.astype("int64"), strict=True))
    return chunks_of(steps, prompts, engine_settings(meta))


def _served_rps(rows: pd.DataFrame, served: pd.DataFrame) -> float | None:
    """Served requests over the whole span of the run: what the server can do at least, since it may have idled."""
    span = window_ns(rows)
    if span is None or len(served) < FEWEST_FOR_A_RATE:
        return None
    return len(served) / max((span[1] - span[0]) / 1e9, 1e-9)


def _book(run: RunDirectory) -> Book | None:
    """None also where a run is too large for it: findings then name no offenders."""
    try:
        return book_of(run)
    except TooLarge:
        return None


def ledger_columns(rows: pd.DataFrame, prefix: str = "ledger") -> pd.DataFrame:
    """The accounts of each request in milliseconds, by account name. `prefix`: ledger (to the last byte) or ttft."""
    columns = {f"{prefix}_{info.column}": info.name for info in ACCOUNTS}
    return rows[list(columns)].astype("float64").rename(columns=columns) / 1e6


def shares(rows: pd.DataFrame, prefix: str = "ledger") -> dict[str, float]:
    """Account → share of the time of all served requests, with what is unaccounted; sums to 1. Empty if none served.

    Of a request that no server recorded, all but the client's own accounts is unaccounted.
    """
    end, left = ("last_byte_ns", "unaccounted_ns") if prefix == "ledger" else ("first_token_ns", "ttft_unaccounted_ns")
    served = rows[(rows.status == "ok") & rows[end].notna()]
    latency_ms = (served[end].astype("float64") - served.due_ns.astype("float64")) / 1e6
    whole_ms = float(latency_ms.sum())
    if whole_ms <= 0:
        return {}
    booked = ledger_columns(served, prefix)
    unbooked_ms = latency_ms - booked.sum(axis=1)
    left_ms = (served[left].astype("float64") / 1e6).fillna(unbooked_ms)
    result = {name: float(ms) / whole_ms for name, ms in booked.sum().items()}
    return result | {UNACCOUNTED: float(left_ms.sum()) / whole_ms}


def by_lifecycle(account_shares: dict[str, float]) -> dict[str, float]:
    """Shares of the four lifecycles and of the client. What is unaccounted belongs to none."""
    result = dict.fromkeys((*LIFECYCLES, "client"), 0.0)
    for info in ACCOUNTS:
        result[info.lifecycle] += account_shares.get(info.name, 0.0)
    return result


def closure(rows: pd.DataFrame) -> Closure:
    """How well the accounts sum to the latency of the requests that client and server both recorded."""
    joined = rows[(rows.status == "ok") & rows.unaccounted_ns.notna()]
    latency = joined.last_byte_ns.astype("float64") - joined.due_ns.astype("float64")
    left = joined.unaccounted_ns.astype("float64").abs()
    share = left / latency.where(latency > 0)
    return Closure(
        joined=len(joined),
        closed=sum(closes(int(ns), int(total)) for ns, total in zip(left, latency, strict=True)),
        worst_share=float(share.max()) if len(joined) else None,
        worst_ns=float(left.max()) if len(joined) else None,
    )


def tightest(facts: Facts, objective: str) -> float | None:
    """The smallest bound that any class of this run has for an objective, in ms."""
    bounds = [objectives_of(klass, facts.objectives).get(objective) for klass in facts.rows.klass.unique()]
    return min((bound for bound in bounds if bound is not None), default=None)


def _device_busy(rows: pd.DataFrame, steps: pd.DataFrame) -> float | None:
    """Device time / time in which at least one request was inside the server, between its arrival and its finish."""
    spans = rows[["arrived_ns", "finished_ns"]].dropna().sort_values("arrived_ns").to_numpy(dtype="float64")
    if not len(steps) or not len(spans):
        return None
    present, end = 0.0, -np.inf
    for begin, until in spans:
        present += max(0.0, until - max(begin, end))
        end = max(end, until)
    inside = (steps.begin_ns < end) & (steps.end_ns > spans[0][0])
    return float(min(1.0, steps.device_ns[inside].sum() / present)) if present > 0 else None


def declared_classes(meta: dict[str, Any]) -> list[dict[str, Any]]:
    """The classes of requests in the scenario; [] where it names none."""
    scenario = meta.get("scenario") if isinstance(meta.get("scenario"), dict) else {}
    return (scenario.get("workload") or {}).get("classes") or []


def _declared_shared_share(meta: dict[str, Any]) -> float:
    shared = total = 0.0
    for klass in declared_classes(meta):
        length = klass.get("prompt_tokens") or 0
        if isinstance(length, dict):  # a distribution: its middle is near enough for a share
            bounds = [length.get(name) or 0 for name in ("min_tokens", "max_tokens")]
            length = length.get("tokens") or length.get("median_tokens") or sum(bounds) / 2
        weight = klass.get("weight") or 1.0
        shared += weight * min(klass.get("shared_prefix_tokens") or 0, length)
        total += weight * length
    return shared / total if total else 0.0


def _cached_share(served: pd.DataFrame) -> float | None:
    prompt = served.server_prompt_tokens.astype("float64")
    cached = served.server_cached_tokens.astype("float64")
    known = prompt.notna() & cached.notna() & (prompt > 0)
    return float(cached[known].sum() / prompt[known].sum()) if known.any() else None


def _work(served: pd.DataFrame) -> Work | None:
    rows = served[served.server_prompt_tokens.notna() & (served.server_output_tokens.astype("float64") > 0)]
    if not len(rows):
        return None
    prompt, output = rows.server_prompt_tokens.astype("float64"), rows.server_output_tokens.astype("float64")
    return Work(
        prompt_tokens=float(prompt.mean()),
        computed_tokens=float((prompt - rows.server_cached_tokens.astype("float64").fillna(0)).clip(lower=1).mean()),
        output_tokens=float(output.mean()),
        context_tokens=float(((prompt + output / 2) * output).sum() / output.sum()),
    )


def _waits(rows: pd.DataFrame, steps: StepFacts | None) -> dict[str, float]:
    """As the scheduler booked it for each request; where an older run has no such column, what the steps refused."""
    booked: Counter[str] = Counter()
    for cell in rows.waits:
        booked.update(reasons(cell))
    del booked[UNDER_WAY]
    total = booked.total()
    if total > 0:
        return {reason: ns / total for reason, ns in booked.items()}
    return steps.waits if steps is not None else {}
