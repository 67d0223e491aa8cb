"""The servers of a fleet beside each other: what each was sent, what its clients saw, and its state over time. Pure."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from sojourn.metrics.memory.pooled_cache import PooledCache, pooled_cache
from sojourn.metrics.request.goodput import judged, measured_steps
from sojourn.metrics.request.latencies import gaps_ms, quantiles
from sojourn.metrics.results.load import declared_window_s
from sojourn.metrics.run.directory import RunDirectory, engine_settings, section
from sojourn.metrics.run.fleet import servers_of
from sojourn.metrics.run.routing import TO, routing_remark

FLEET = "fleet"
BINS = 120  # of the time of a run, at most
LEAST_BIN_S = 0.5
STATES = ("running", "waiting", "kv_use", "batch_tokens", "busy")
NO_HASHES = "The servers recorded no hashes of KV blocks: an older version, a foreign server, or no step at all."


@dataclass(frozen=True, slots=True)
class Replica:
    """The measured requests of one server, or of all: then also those that reached no server."""

    name: str
    requests: int
    not_served: int
    prompt_tokens: int
    output_tokens: int
    goodput_rps: float
    attainment: float
    quantiles_ms: dict[str, dict[str, float | None]]  # of ttft_ms, itl_ms, e2e_ms; None where samples are too few
    routing_ms: dict[str, float | None]  # likewise; of the account request.routing
    busy: float | None  # mean over servers of the share of the time in which the device worked; None without steps
    peak_waiting: float | None
    settings: dict[str, Any] = field(default_factory=dict)  # of this server alone

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class FleetView:
    """A run of several servers. A timeline has a row a span of time: `at_s` and STATES; spans are those of all."""

    replicas: tuple[Replica, ...]
    whole: Replica
    timelines: dict[str, pd.DataFrame]
    pooled: PooledCache | None
    no_pooled: str  # why there is none, "" where there is one
    router: str  # name and policy
    remark: str  # on request.routing, "" where it is measured

    @property
    def imbalance(self) -> float:
        """Most tokens of a server, prompt and output, over the mean."""
        return max((self.share_of_mean(replica) for replica in self.replicas), default=math.nan)

    def share_of_mean(self, replica: Replica) -> float:
        mean = sum(each.tokens for each in self.replicas) / max(len(self.replicas), 1)
        return replica.tokens / mean if mean else math.nan


def fleet_view(run: RunDirectory, requests: pd.DataFrame) -> FleetView | None:
    """Of a run of a fleet and its measured requests; None for a run of one server."""
    meta = run.meta()
    members = servers_of(run, meta)
    if len(members) < 2 or requests.empty:
        return None
    objectives, declared_s = meta.get("objectives") or [], declared_window_s(meta)
    rows = judged(requests, objectives)
    begin, end = float(requests.due_ns.min()), float(requests.last_byte_ns.max())
    if not end > begin:
        end = float(requests.due_ns.max()) + 1e9
    named = {str(entry["name"]): entry for entry in meta["servers"]}
    window_s = declared_s or (end - begin) / 1e9
    steps = {member.name: measured_steps(member.table("steps"), requests) for member in members}
    timelines = {name: timeline(table, begin, end) for name, table in steps.items() if len(table)}
    replicas = tuple(
        _replica(member.name, rows[rows.server == member.name], window_s,
                 timelines.get(member.name), named[member.name].get("settings") or {})
        for member in members
    )  # fmt: skip
    busy = [replica.busy for replica in replicas if replica.busy is not None]
    peaks = [replica.peak_waiting for replica in replicas if replica.peak_waiting is not None]
    whole = _replica(FLEET, rows, window_s, None, {},
                     busy=sum(busy) / len(busy) if busy else None, peak_waiting=max(peaks, default=None))  # fmt: skip
    pooled = _pooled(run, members[0], set(requests.request_id))
    return FleetView(
        replicas, whole, timelines, pooled, "" if pooled is not None else NO_HASHES, _router(meta), routing_remark(meta)
    )


def _pooled(run: RunDirectory, member: RunDirectory, measured: set[str]) -> PooledCache | None:
    block_size = engine_settings(run.meta()).get("block_size") or engine_settings(member.meta()).get("block_size")
    return pooled_cache(run.table("requests"), int(block_size), measured) if block_size else None


def _router(meta: dict[str, Any]) -> str:
    router = section(meta, "router")
    return " with ".join(str(router[key]) for key in ("name", "policy") if router.get(key)) or "a router"


def timeline(steps: pd.DataFrame, begin_ns: float, end_ns: float) -> pd.DataFrame:
    """STATES of one server in equal spans of time. Requests, blocks and the device are means over time: 0 between
    steps, where the server has nothing to do. `batch_tokens` is the mean of the steps that began in the span."""
    seconds = (end_ns - begin_ns) / 1e9
    bins = max(1, min(BINS, int(seconds / LEAST_BIN_S)))
    edges = np.linspace(begin_ns, end_ns, bins + 1)
    ordered = steps.sort_values("begin_ns", ignore_index=True)
    begins, ends = (ordered[name].to_numpy(dtype="float64") for name in ("begin_ns", "end_ns"))
    begins = np.maximum(begins, np.append(begins[:1], ends[:-1]))  # two steps are under way where the loop overlaps
    ends = np.maximum(ends, begins)
    blocks = ordered.blocks_active.astype("float64")
    pool = ordered[[name for name in ordered if name.startswith("blocks_")]].astype("float64").sum(axis=1)
    lasting = np.maximum(ends - begins, 1.0)
    states = {
        "running": ordered.request_ids.map(len).to_numpy(dtype="float64"),
        "waiting": ordered.waiting.to_numpy(dtype="float64"),
        "kv_use": (blocks / pool.where(pool > 0)).fillna(0.0).to_numpy(),
        "busy": np.minimum(ordered.device_ns.astype("float64").fillna(0.0).to_numpy() / lasting, 1.0),
    }
    found = {name: _means(values, begins, ends, edges) for name, values in states.items()}
    tokens = ordered.new_tokens.map(sum).to_numpy(dtype="float64")
    counted, summed = (np.histogram(begins, edges, weights=weights)[0] for weights in (None, tokens))
    found["batch_tokens"] = summed / np.maximum(counted, 1)
    return pd.DataFrame({"at_s": ((edges[:-1] + edges[1:]) / 2 - begin_ns) / 1e9} | {n: found[n] for n in STATES})


def _means(values: np.ndarray, begins: np.ndarray, ends: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Mean over each span of a value that holds from begin to end, and is 0 otherwise."""
    moments = np.column_stack([begins, ends]).ravel()
    area = np.cumsum(values * (ends - begins))
    integral = np.column_stack([np.append(0.0, area[:-1]), area]).ravel()
    return np.diff(np.interp(edges, moments, integral)) / np.diff(edges)


def _replica(
    name: str, rows: pd.DataFrame, seconds: float, states: pd.DataFrame | None,
    settings: dict[str, Any], *, busy: float | None = None, peak_waiting: float | None = None,
) -> Replica:  # fmt: skip
    failed = int((rows.status != "ok").sum())
    served = rows[rows.status == "ok"]
    gaps, owners = gaps_ms("itl_ms", rows)
    good = int(rows.good.sum())
    prefilled = rows.server_prompt_tokens.fillna(rows.prompt_tokens) if len(rows) else rows.prompt_tokens
    if states is not None:
        busy, peak_waiting = float(states.busy.mean()), float(states.waiting.max())
    return Replica(
        name, len(rows), failed, _whole(prefilled), _whole(rows.output_tokens), good / seconds if seconds else 0.0,
        good / len(rows) if len(rows) else math.nan,
        {
            "ttft_ms": quantiles(served.ttft_ms.astype("float64"), failed),
            "itl_ms": quantiles(pd.Series(gaps), requests=len(np.unique(owners))),
            "e2e_ms": quantiles(served.e2e_ms.astype("float64"), failed),
        },
        quantiles(rows[f"ledger_{TO}"].astype("float64").dropna() / 1e6) if f"ledger_{TO}" in rows else {},
        busy, peak_waiting, settings,
    )  # fmt: skip


def _whole(tokens: pd.Series) -> int:
    return int(tokens.astype("float64").fillna(0).sum())
