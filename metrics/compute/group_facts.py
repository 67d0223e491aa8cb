"""What a parallel group did with its time: exchanges, waits between stages, and what one process would take."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pandas as pd

from sojourn.metrics.cells import keys_of, lengths, row_sums, sums_by_key, sums_by_place, values
from sojourn.metrics.compute.communication import WAITS, GroupShape, group_shape_from, predicted
from sojourn.metrics.compute.link import POINT_TO_POINT, Link
from sojourn.metrics.compute.one_process import one_process_ns
from sojourn.metrics.records import COLLECTIVES
from sojourn.metrics.run.directory import section, server_hardware

GPU_SHARE = 0.8  # of a GPU's memory that weights may take: the rest is for KV and activations
MIB = 1 << 20
FASTEST = 0.1  # of the steps
SLOW = 1.5  # computation over that of ranks with as much to do; two ranks on two busy cores reach 1.2
SLOW_STAGE = 2.0  # computation over that of other stages, of which one may have a layer more
LOST = 0.1  # of the steps' time, that the other ranks wait


class CollectiveTime(NamedTuple):
    """One kind of exchange of rank 0 over a run. Nanoseconds."""

    name: str
    bytes: int  # of whole tensors
    exposed_ns: int  # rank 0 stood in it
    link_ns: float | None  # that the measured link needs; None without that link, and of waits for another stage
    hidden_ns: int | None  # under way while neither rank stood for it; None where that was not measured


class SlowestRank(NamedTuple):
    """The rank whose computation the others wait for most."""

    rank: int
    times: float  # its computation over the median of the ranks that it is compared with
    lost_share: float  # of the steps' time: how much longer it computes than they do
    of_stage: bool  # it is compared with ranks that compute the same layers; else with other stages

    @property
    def is_slow(self) -> bool:
        return self.times >= (SLOW if self.of_stage else SLOW_STAGE) and self.lost_share >= LOST


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """A group of at least two ranks. Nanoseconds are sums over the run; lists are by rank, or by stage."""

    shape: GroupShape
    steps: int
    device_ns: float  # of rank 0's steps
    sampling_ns: float  # of these steps: rank 0 alone draws
    head_share: float  # of a pipeline: of the first stage's FLOPs, which no other stage has
    busy_ns: list[float]
    communication_ns: list[float]
    bubble_ns: list[float]
    collectives: list[CollectiveTime]
    link_slowdown: float | None  # of exchanges, over what the measured link needs for them; None where nobody measured
    fits_one_device: bool | None  # None where nobody knows
    one_process_share: float  # of the ranks' computation that one process would do one after the other, 0 to 1
    measured_alone_ns: float | None  # the same steps in one process, by its runs; None where none is known
    expert_rank_tokens: list[int]  # of counted steps, by the ranks that hold the experts; [] where all hold all

    @property
    def exchange_ns(self) -> float:
        """In exchanges, without the wait for slower ranks: of the rank of the first stage that stands least in them."""
        return min(self.communication_ns[: self.shape.ranks_per_stage])

    @property
    def communication_share(self) -> float:
        """Of the steps' time, in exchanges that no computation hides."""
        return self._share(self.exchange_ns)

    @property
    def slowest(self) -> SlowestRank:
        computed, size = self.computed_ns, self.shape.ranks_per_stage
        found = []
        for rank, own_ns in enumerate(computed):
            stage = range(rank // size * size, rank // size * size + size)
            all_others = [other for other in range(len(computed)) if other != rank]
            peers = [other for other in all_others if other in stage] or all_others
            typical_ns = float(np.median([computed[each] for each in peers]))
            times, lost = own_ns / max(typical_ns, 1.0), self._share(own_ns - typical_ns)
            found.append(SlowestRank(rank, times, lost, size > 1))
        return max(found, key=lambda each: each.lost_share)

    @property
    def computed_ns(self) -> list[float]:
        """By rank, without what others have not: the draws of rank 0, and the head of the first stage."""
        layers_ns = [ns - self.sampling_ns * (rank == 0) for rank, ns in enumerate(self.busy_ns)]
        size = self.shape.ranks_per_stage
        return [max(0.0, ns * (1 - self.head_share)) for ns in layers_ns[:size]] + layers_ns[size:]

    @property
    def expert_imbalance(self) -> float | None:
        """Tokens for the experts of the busiest rank over the mean of the ranks; None where that was not counted."""
        tokens = self.expert_rank_tokens
        return max(tokens) / max(float(np.mean(tokens)), 1e-9) if sum(tokens) else None

    @property
    def saved_ns(self) -> float:
        """What the division spares: rank 0 computes only its part of what one process would."""
        return max(0.0, self.one_process_ns - self.busy_ns[0])

    @property
    def one_process_ns(self) -> float:
        """Device time of the same steps in one process, of the cores or the device that it would have. Where no run of
        one tells, the sum of what the ranks computed: an upper bound, since each of them has the costs of a step."""
        if self.measured_alone_ns is not None:
            return self.measured_alone_ns
        return sum(self.busy_ns) * self.one_process_share

    @property
    def one_process_speed(self) -> float:
        """Device time of the group over that of one process: above 1 the group is slower."""
        return self.device_ns / self.one_process_ns if self.one_process_ns > 0 else 1.0

    @property
    def bubble_shares(self) -> list[float]:
        """Of each stage's time, waiting for another one. A rank that waits for the next step is in none of these."""
        stages = np.array([self.busy_ns, self.communication_ns, self.bubble_ns]).reshape(
            3, self.shape.pipeline_parallel, -1
        )
        whole = stages.sum(axis=(0, 2))
        return (stages[2].sum(axis=1) / np.maximum(whole, 1.0)).tolist()

    @property
    def imbalance(self) -> float:
        """The longest computation of a rank over the mean: 1 where all have as much to do."""
        return max(self.busy_ns) / max(float(np.mean(self.busy_ns)), 1.0)

    def _share(self, ns: float) -> float:
        return ns / self.device_ns if self.device_ns > 0 else 0.0


def group_facts(meta: Mapping[str, Any], steps: pd.DataFrame) -> GroupFacts | None:
    """None for one process, and where no rank reported."""
    try:
        shape = group_shape_from(meta)
    except msgspec.ValidationError:
        return None
    if shape is None or "rank_busy_ns" not in steps:
        return None
    if not (lengths(steps.rank_busy_ns) == shape.num_ranks).any():
        return None
    busy, communication, bubble = (
        _padded(sums_by_place(steps[f"rank_{name}_ns"]), shape.num_ranks)
        for name in ("busy", "communication", "bubble")
    )
    return GroupFacts(
        shape=shape,
        steps=len(steps),
        device_ns=float(steps.device_ns.sum()),
        sampling_ns=float(steps.sampling_ns.fillna(0).sum()) if "sampling_ns" in steps else 0.0,
        head_share=_head_share(shape, steps),
        busy_ns=busy.tolist(),
        communication_ns=communication.tolist(),
        bubble_ns=bubble.tolist(),
        collectives=_collectives(shape, links_of(meta), steps),
        link_slowdown=_link_slowdown(shape, links_of(meta), steps),
        fits_one_device=_fits_one_device(meta, shape),
        one_process_share=(share := _one_process_share(meta, shape)),
        measured_alone_ns=one_process_ns(meta, steps, threads=round(1 / share)),
        expert_rank_tokens=_expert_rank_tokens(shape, steps),
    )


def links_of(meta: Mapping[str, Any]) -> list[Link]:
    """Those of the server's device, where they were measured before the run."""
    try:
        return msgspec.convert(section(meta, "ceilings").get("links") or [], list[Link])
    except msgspec.ValidationError:
        return []


def _padded(sums: np.ndarray, count: int) -> np.ndarray:
    """[count]: a step has the ranks up to the last that reported since the step before."""
    return np.pad(sums[:count], (0, max(0, count - len(sums))))


def _sums(column: pd.Series) -> dict[str, int]:
    sums = sums_by_key(column, keys_of(column)).sum()
    return {str(name): int(total) for name, total in sums.items()}


def _collectives(shape: GroupShape, links: list[Link], steps: pd.DataFrame) -> list[CollectiveTime]:
    """Those that occurred. Their calls follow from the layers: see GroupShape."""
    moved, exposed = (_sums(steps[name]) for name in ("exchanged_bytes", "exchange_ns"))
    tokens, rows = _tokens(steps), steps.logit_rows.to_numpy("int64")
    calls = {name: int(np.sum(each.calls)) for name, each in shape.exchanges(tokens, rows).items()}
    hidden = _sums(steps.exchange_hidden_ns) if "exchange_hidden_ns" in steps else None
    by_name, found = {link.collective: link for link in links}, []
    for name in COLLECTIVES:
        if name not in exposed and name not in moved:
            continue
        num_bytes, link_ns, hidden_ns = moved.get(name, 0), None, None
        if name in by_name and name in calls and name not in WAITS:
            link_ns = float(by_name[name].exchange_ns(calls[name], num_bytes))
        if hidden is not None:
            is_waited_for = name not in (POINT_TO_POINT, *WAITS)
            hidden_ns = hidden.get(name, 0) if hidden or is_waited_for else None
        found.append(CollectiveTime(name, num_bytes, exposed.get(name, 0), link_ns, hidden_ns))
    return found


def _tokens(steps: pd.DataFrame) -> np.ndarray:
    return row_sums(steps.new_tokens).astype(np.int64)


def _link_slowdown(shape: GroupShape, links: list[Link], steps: pd.DataFrame) -> float | None:
    """Of the tenth of the steps with the fastest exchanges: ranks that lack a core wait for each other in many steps,
    and a slow link is slow in all. Of the rank that stands least in them, since the others wait for that one, too."""
    steps = steps[lengths(steps.rank_communication_ns) == shape.num_ranks]
    found = predicted(shape, links, _tokens(steps), steps.logit_rows.to_numpy("int64"), np.zeros(len(steps)))
    if found is None or not np.any(found.exchange_ns > 0):
        return None
    ranks = np.asarray(values(steps.rank_communication_ns)[0], dtype=float).reshape(-1, shape.num_ranks)
    stage = ranks[:, : shape.ranks_per_stage]
    least = np.where(stage > 0, stage, np.inf).min(axis=1)  # 0: its report came with the next step
    return float(np.quantile(least / found.exchange_ns, FASTEST))


def _head_share(shape: GroupShape, steps: pd.DataFrame) -> float:
    if shape.pipeline_parallel == 1 or "flops_head" not in steps or not steps.flops.sum():
        return 0.0
    return float(steps.flops_head.sum() / steps.flops.sum())


def _expert_rank_tokens(shape: GroupShape, steps: pd.DataFrame) -> list[int]:
    """A rank holds as many neighbouring experts as the others."""
    if shape.expert_parallel == 1 or "expert_tokens" not in steps:
        return []
    tokens = sums_by_place(steps.expert_tokens)
    return tokens.reshape(shape.expert_parallel, -1).sum(axis=1).astype(int).tolist()


def _fits_one_device(meta: Mapping[str, Any], shape: GroupShape) -> bool | None:
    """Ranks of a CPU share its memory, so that one process has the room of all."""
    core = section(meta, "core")
    if core.get("device", "cpu") == "cpu":
        return True
    gpus = server_hardware(meta).get("gpus") or []
    memory = next((gpu.get("memory.total") for gpu in gpus if isinstance(gpu, dict)), None)
    weights = core.get("weight_bytes")
    if not weights or not isinstance(memory, str) or not memory.split()[0].isdigit():
        return None
    return weights * shape.num_ranks <= GPU_SHARE * int(memory.split()[0]) * MIB


def _one_process_share(meta: Mapping[str, Any], shape: GroupShape) -> float:
    """On a CPU without a chosen number of threads, one process has the threads of all ranks."""
    chosen = section(meta, "engine").get("threads")
    on_cpu = section(meta, "core").get("device", "cpu") == "cpu"
    return 1 / shape.num_ranks if on_cpu and not chosen else 1.0
