"""What the servers of a fleet did, each by itself and beside the others. Steps of two servers are never mixed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from sojourn.diagnosis.evidence_level import Level, view_at_level
from sojourn.diagnosis.step_facts import FEWEST_STEPS_FOR_A_FIT, composition, fit
from sojourn.metrics.memory.pooled_cache import PooledCache, pooled_cache
from sojourn.metrics.request.goodput import measured_steps
from sojourn.metrics.run.directory import RunDirectory, engine_settings, section
from sojourn.metrics.run.fleet import servers_of

WAITING = ("request_admission", "request_queue", "memory_blocked")  # accounts of a request without a place
# Settings that name one server: they differ in every fleet.
OWN = {"host", "port", "run_dir", "kv_events", "kv_events_replay", "served", "replicas", "base_url"}
FEWEST_INSIDE = 0.5  # of the measured steps: fewer would show a part of the run only
MANY = 2.0  # requests of one server over those of another, from which on the other one is idle beside it

Sizes = tuple[np.ndarray, np.ndarray, np.ndarray]  # of each step: tokens, tokens of context, device nanoseconds


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """One server of a fleet. Nanoseconds are sums over its requests, or over its steps."""

    name: str
    requests: int
    tokens: float  # that it computed: of prompts without what a cache had, and of outputs
    present_ns: float  # of its requests, from arrival to finish
    waited_ns: float  # of its requests, before they had a place in the batch
    busy_ns: float  # device time of its steps
    slowdown: float | None  # of its steps over steps of that size on the other servers; None for too few steps
    settings: dict[str, Any]  # those that are not the same on all servers


@dataclass(frozen=True, slots=True)
class FleetFacts:
    """At least two servers behind a router."""

    replicas: list[ReplicaFacts]
    router: str  # its name; "" where nobody said
    policy: str  # of the router; "" where nobody said
    router_is_here: bool  # client, router and servers ran on one host
    span_ns: float  # from the first arrival to the last finish
    pooled: PooledCache | None  # what the choice of servers cost in prefix hits; None without hashes of blocks
    present_beside_idle: float  # of the requests' time on the busiest server, while another had half as many or fewer

    @property
    def busiest(self) -> ReplicaFacts:
        """The server whose requests were there longest."""
        return max(self.replicas, key=lambda each: each.present_ns)

    @property
    def imbalance(self) -> float:
        """Time of the requests on the busiest server over the mean: 1 where all servers have as much."""
        return self.busiest.present_ns / max(float(np.mean([each.present_ns for each in self.replicas])), 1.0)

    @property
    def work_imbalance(self) -> float:
        """Tokens that the busiest server computed over the mean."""
        return self.busiest.tokens / max(float(np.mean([each.tokens for each in self.replicas])), 1.0)

    @property
    def slowest(self) -> ReplicaFacts | None:
        """The server with the slowest steps of their size; None where no server has enough steps."""
        known = [each for each in self.replicas if each.slowdown is not None]
        return max(known, key=lambda each: each.slowdown or 0.0, default=None)

    @property
    def busy_shares(self) -> list[float]:
        """Of the run, in which the device of each server worked: 0 to 1."""
        return [min(1.0, each.busy_ns / max(self.span_ns, 1.0)) for each in self.replicas]


def fleet_facts(run: RunDirectory, rows: pd.DataFrame, level: Level) -> FleetFacts | None:
    """The facts of `rows`, the measured requests. None for one server, and where a server recorded no request."""
    meta = run.meta()
    members = servers_of(run, meta)
    if len(members) < 2 or "server" not in rows or not rows.arrived_ns.notna().any():
        return None
    served = rows[rows.arrived_ns.notna() & rows.finished_ns.notna()]
    of_server = {member.name: served[served.server == member.name] for member in members}
    views = [view_at_level(member, level) for member in members]
    steps = [measured_steps(view.table("steps"), rows) for view in views]
    settings = _differing([section(view.meta(), "engine") for view in views])
    slowdowns = _slowdowns(steps)
    replicas = [
        ReplicaFacts(
            name=member.name,
            requests=len(own),
            tokens=_sum(own.server_prompt_tokens) - _sum(own.server_cached_tokens) + _sum(own.server_output_tokens),
            present_ns=_sum(own.finished_ns) - _sum(own.arrived_ns),
            waited_ns=float(_waited_ns(own).sum()),
            busy_ns=float(table.device_ns.sum()) if len(table) else 0.0,
            slowdown=slowdown,
            settings=differs,
        )
        for (member, own, table, slowdown, differs) in zip(
            members, of_server.values(), steps, slowdowns, settings, strict=True
        )
    ]
    router = section(meta, "router")
    begin, end = float(served.arrived_ns.astype("float64").min()), float(served.finished_ns.astype("float64").max())
    busiest = max(replicas, key=lambda each: each.present_ns).name
    others = [own for name, own in of_server.items() if name != busiest]
    return FleetFacts(
        replicas=replicas,
        router=str(router.get("name") or ""),
        policy=str(router.get("policy") or ""),
        router_is_here=bool(router.get("same_host")),
        span_ns=end - begin,
        pooled=_pool(run, rows, level),
        present_beside_idle=_beside_idle(of_server[busiest], others),
    )


def _pool(run: RunDirectory, rows: pd.DataFrame, level: Level) -> PooledCache | None:
    block_size = engine_settings(run.meta()).get("block_size")
    known = view_at_level(run, level).table("requests")
    return pooled_cache(known, int(block_size), set(rows.request_id)) if block_size and len(known) else None


def _sum(column: pd.Series) -> float:
    return float(column.astype("float64").fillna(0.0).sum())


def _waited_ns(rows: pd.DataFrame) -> pd.Series:
    return rows[[f"ttft_{name}_ns" for name in WAITING]].astype("float64").fillna(0.0).sum(axis=1)


def _beside_idle(busiest: pd.DataFrame, others: Sequence[pd.DataFrame]) -> float:
    """Of the time of the busiest server's requests, while some other server had at most half as many: 0 to 1."""
    tables = [busiest, *others]
    moments = np.unique(np.concatenate([table[name].to_numpy("float64") for table in tables
                                        for name in ("arrived_ns", "finished_ns")]))  # fmt: skip
    if len(moments) < 2:
        return 0.0
    present = np.stack([_present(table, moments[:-1]) for table in tables])
    weight = present[0] * np.diff(moments)
    idle = MANY * present[1:].min(axis=0) <= present[0]
    return float(weight[idle].sum() / weight.sum()) if weight.sum() > 0 else 0.0


def _present(rows: pd.DataFrame, moments: np.ndarray) -> np.ndarray:
    """[moments]: requests that had arrived and not finished at each of them."""
    arrived, finished = (np.sort(rows[name].to_numpy("float64")) for name in ("arrived_ns", "finished_ns"))
    return np.searchsorted(arrived, moments, side="right") - np.searchsorted(finished, moments, side="right")


def _slowdowns(steps: Sequence[pd.DataFrame]) -> list[float | None]:
    """Of each server: device time of its steps over that of the others, for steps of the same size."""
    sizes = [_sizes(table) for table in steps]
    found: list[float | None] = []
    for own in range(len(steps)):
        rest = [each for k, each in enumerate(sizes) if k != own]
        others = tuple(np.concatenate(column) for column in zip(*rest, strict=True))
        slowdown, inverse = _over_fit(sizes[own], others), _over_fit(others, sizes[own])
        found.append(slowdown if slowdown is not None or not inverse else 1 / inverse)
    return found


def _over_fit(measured: Sizes, fitted: Sizes) -> float | None:
    """The median of the measured device times over those of a fit to other steps. None for too few steps.

    Only steps that are no larger than the fitted ones count, since a fit says nothing of larger ones. A server with
    larger batches than the others has few such steps; then the others are measured against a fit to its own.
    """
    model = fit(*fitted)
    if model is None:
        return None
    tokens, context, device = measured
    inside = (tokens > 0) & (tokens <= fitted[0].max()) & (context <= fitted[1].max())
    expected = model.predict(tokens[inside], context[inside])
    known = expected > 0
    if known.sum() < max(FEWEST_STEPS_FOR_A_FIT, FEWEST_INSIDE * len(tokens)):
        return None
    return float(np.median(device[inside][known] / expected[known]))


def _sizes(steps: pd.DataFrame) -> Sizes:
    if not len(steps):
        return np.zeros(0), np.zeros(0), np.zeros(0)
    held = composition(steps)
    tokens = (held.prompt_tokens + held.decode_tokens).to_numpy()
    return tokens, held.context.to_numpy(), steps.device_ns.to_numpy("float64")


def _differing(settings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each server the settings that are not the same on all. What names a server or its ports always differs."""
    names = sorted({name for each in settings for name in each} - OWN)
    unequal = [name for name in names if any(each.get(name) != settings[0].get(name) for each in settings)]
    return [{name: each.get(name) for name in unequal} for each in settings]
