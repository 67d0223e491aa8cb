"""Who had the CPUs during a run: our processes, others, and nobody; and what kept the front's event loop busy.

A slow step or a slow front has three explanations that look alike in its wall time. It computed longer, it waited for a
core that another process had, or it slept. The kernel tells them apart, thread by thread.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from sojourn.metrics.machine.neighbours import MOST_NAMED
from sojourn.metrics.run.devices import num_ranks
from sojourn.metrics.run.directory import section, server_hardware
from sojourn.metrics.run.front_turns import Turns

PARTS = 4  # of the window, to see what was there only for a while
COMPUTES = 0.5  # of what a thread of the core computes in the mean: the loop's thread is one of them
RARELY = 0.2  # of the mean: in a part with so little work, waits are those of threads without any
MOST_DELAYED = 0.9  # of the steps' time: a share near 1 would call any speed normal
LONG_TURN_NS = 10_000_000  # of the front's loop: a pause that a reader of text may notice


@dataclass(frozen=True, slots=True)
class FrontLoop:
    """The front's event loop over the window. Shares are 0 to 1."""

    busy: float  # of the time, it ran callbacks
    busy_worst: float  # of the busiest second
    on_cpu: float | None  # of its busy time, on a core
    queued: float | None  # of its busy time, ready and waiting for a core; the rest it slept within a callback
    queued_by_others: float | None  # of its busy time, waiting for a core because of processes that are not ours
    long_turns: int  # of at least LONG_TURN_NS
    long_share: float  # of the time, in those
    longest_ms: float
    encoding: float  # of its busy time, templates and tokenizer; more than 1 where threads do it beside the loop
    decoding: float  # of its busy time, ids → text
    writing: (
        float  # of its busy time, handing chunks to sockets, with waits for readers: these do not keep the loop busy
    )


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """The window of the measured requests. Cores are means; None where nothing was sampled or the kernel is silent."""

    cores: int
    threads: int  # of the core and the ranks beside it that compute a step together
    front_cores: float | None
    core_cores: float | None  # of the core process
    load_cores: float | None  # of the load generator; None where it has a machine of its own
    load_cores_worst: float | None
    load_queued: float | None  # run-queue time of its threads / time
    others_cores: float | None  # of all processes that are not ours
    others_cores_worst: float | None  # of the same, in the worst quarter of the window
    siblings_cores: float  # of that, of the fleet's other servers
    neighbours: Mapping[str, float]  # `name (pid)` of the busiest other processes → mean cores, most first
    # Run-queue time of the loop's thread / time of steps, where that thread computes; else of the core's threads / time
    # that they could have computed.
    core_queued: float | None
    core_queued_worst: float | None  # of the same, in the worst quarter
    core_queued_by_others: float | None  # of that time, because of processes that are not ours
    core_queued_by_others_worst: float | None  # of the same, in the worst quarter
    front: FrontLoop | None

    def bound_delay(self, queued: float | None) -> float:
        """Of the steps' time, 0 to 1, at most so much was spent in waits for a core: a step waits for its last thread,
        and each may wait at another time."""
        return min(MOST_DELAYED, (queued or 0.0) * self.threads)


def machine_facts(
    meta: Mapping[str, Any], system: pd.DataFrame, steps: pd.DataFrame, rows: pd.DataFrame,
    window_ns: tuple[float, float] | None, siblings: Sequence[pd.DataFrame] = (),
) -> MachineFacts | None:  # fmt: skip
    """`steps` and `rows` are those that were measured; `siblings` are the samples of the fleet's other servers on this
    machine. None where nothing was sampled within the window."""
    if window_ns is None or len(system) < 2:
        return None
    samples = system.sort_values("ns", ignore_index=True)
    margin = 1e9  # a sample is of the second before it
    samples = samples[(samples.ns >= window_ns[0] - margin) & (samples.ns <= window_ns[1] + margin)]
    if len(samples) < 2:
        return None
    hardware, load = server_hardware(meta), section(meta, "load_use")
    cores = int(hardware.get("cores") or 1)
    is_beside = hardware.get("boot_id") == section(meta, "hardware").get("boot_id")
    load_cores = load.get("cpu_cores") if is_beside else None
    span = _values(samples, "ns")
    lasted = np.diff(span)
    walls = _walls(steps, span)
    threads = int(section(meta, "core").get("threads") or 1) * num_ranks(meta)
    front, core = (_rate(samples, f"{name}_cpu_seconds", 1e9, lasted) for name in ("front", "core"))
    others = _others(samples, cores, front, core, load_cores)
    queued = _queued(samples, threads)
    possible = walls * threads
    if queued is not None and core is not None and not walls.any():  # no step was read: it ran, or was ready to
        possible = core * lasted + queued
    possible = np.maximum(possible, 1.0)
    by_others = None
    if queued is not None and others is not None and front is not None:
        by_others = queued * _part_of_others(others, front, load_cores)
    return MachineFacts(
        cores=cores,
        threads=threads,
        front_cores=_mean(front, lasted),
        core_cores=_mean(core, lasted),
        load_cores=load_cores,
        load_cores_worst=load.get("cpu_cores_max"),
        load_queued=load.get("queued_share"),
        others_cores=_mean(others, lasted),
        others_cores_worst=_worst(others, lasted),
        siblings_cores=sum(_cores_within(each, float(span[0]), float(span[-1])) for each in siblings),
        neighbours=_neighbours(samples, lasted, load.get("pids") or ()),
        core_queued=None if queued is None else min(1.0, float(queued.sum() / possible.sum())),
        core_queued_worst=_worst_share(queued, possible),
        core_queued_by_others=None if by_others is None else min(1.0, float(by_others.sum() / possible.sum())),
        core_queued_by_others_worst=_worst_share(by_others, possible),
        front=_front_loop(
            samples, rows, lasted,
            None if others is None or core is None else _part_of_others(others, core, load_cores),
        ),
    )  # fmt: skip


def _queued(samples: pd.DataFrame, threads: int) -> np.ndarray | None:
    """Run-queue time of as many threads as compute a step, between each two samples."""
    loop = _critical_loop(samples, threads)
    return _gain(samples, "core_queued_ns") if loop is None else loop * threads


def _critical_loop(samples: pd.DataFrame, threads: int) -> np.ndarray | None:
    """Between each two samples, the run-queue time of the thread that runs the loop, if it computes as well: every step
    waits for it. The sum over all threads says no such thing: others wait while nobody waits for them.

    None where that thread only waits for workers, and where the kernel does not tell.
    """
    queued, on_cpu = _gain(samples, "core_loop_queued_ns"), _gain(samples, "core_loop_cpu_ns")
    spent = _gain(samples, "core_cpu_seconds")
    if queued is None or on_cpu is None or spent is None:
        return None
    mean_ns = 1e9 * float(spent.sum()) / threads
    return queued if float(on_cpu.sum()) >= COMPUTES * mean_ns > 0 else None


def _part_of_others(others: np.ndarray, ours: np.ndarray, load_cores: float | None) -> np.ndarray:
    """Of each second in which a thread of ours waits for a core, the part for which others have it: whoever ran
    meanwhile had the cores. `ours`: cores of the other process of the server."""
    return others / np.maximum(others + ours + (load_cores or 0.0), 1e-9)


def _front_loop(
    samples: pd.DataFrame, rows: pd.DataFrame, lasted: np.ndarray, part_of_others: np.ndarray | None
) -> FrontLoop | None:
    busy = _gain(samples, "loop_busy_ns")
    if busy is None or busy.sum() <= 0:
        return None
    whole, time_ns = float(busy.sum()), float(lasted.sum())
    cpu, queued = (_gain(samples, f"front_loop_{name}_ns") for name in ("cpu", "queued"))
    turns = Turns.of(samples.iloc[1:])
    long = turns.lasted_ns[turns.lasted_ns >= LONG_TURN_NS]
    work = {name: float(rows[f"{name}_ns"].astype("float64").fillna(0).sum()) / whole if f"{name}_ns" in rows else 0.0
            for name in ("encoding", "decoding", "writing")}  # fmt: skip
    return FrontLoop(
        busy=min(1.0, whole / time_ns),
        busy_worst=min(1.0, float((busy / lasted).max())),
        on_cpu=None if cpu is None else min(1.0, float(cpu.sum()) / whole),
        queued=None if queued is None else min(1.0, float(queued.sum()) / whole),
        queued_by_others=None
        if queued is None or part_of_others is None
        else min(1.0, float((queued * part_of_others).sum()) / whole),
        long_turns=len(long),
        long_share=min(1.0, float(long.sum()) / time_ns),
        longest_ms=float(turns.lasted_ns.max(initial=0.0)) / 1e6,
        **work,
    )


def _others(
    samples: pd.DataFrame, cores: int, front: np.ndarray | None, core: np.ndarray | None, load: float | None
) -> np.ndarray | None:
    """Cores of other processes in each second. Without the load generator's share its cores count as theirs."""
    host = _column(samples, "host_cpu_percent")
    if host is None or front is None or core is None:
        return None
    return np.maximum(0.0, host / 100 * cores - front - core - (load or 0.0))


def _neighbours(samples: pd.DataFrame, lasted: np.ndarray, of_load: Collection[int]) -> dict[str, float]:
    """The busiest processes that the samples name, without those of the load generator."""
    spent: Counter[str] = Counter()
    later = samples.iloc[1:]
    for names, cores, ns in zip(later.neighbours, later.neighbour_cores, lasted, strict=True):
        for name, each in zip(() if names is None else names, () if cores is None else cores, strict=True):
            if int(name.rpartition("(")[2].rstrip(")")) not in of_load:
                spent[name] += each * ns
    return {name: cores / lasted.sum() for name, cores in spent.most_common(MOST_NAMED)}


def _cores_within(samples: pd.DataFrame, begin_ns: float, end_ns: float) -> float:
    """Mean cores of the processes of a server; 0 where it was not sampled."""
    ordered = samples.sort_values("ns")
    spent = _values(ordered, "front_cpu_seconds") + _values(ordered, "core_cpu_seconds")
    known = ~np.isnan(spent)  # there is no core yet in the first ones
    if not known.any() or end_ns <= begin_ns:
        return 0.0
    gained = np.interp([begin_ns, end_ns], _values(ordered, "ns")[known], spent[known])
    return max(0.0, float(gained[1] - gained[0]) * 1e9 / (end_ns - begin_ns))


def _walls(steps: pd.DataFrame, span: np.ndarray) -> np.ndarray:
    """Nanoseconds of steps between each two samples."""
    if not len(steps):
        return np.zeros(len(span) - 1)
    begins, ends = (_values(steps.sort_values("step"), name) for name in ("begin_ns", "end_ns"))
    corners = np.column_stack([begins, np.maximum(ends, begins)]).ravel()
    spent = np.repeat(np.concatenate([[0.0], np.cumsum(ends - begins)]), 2)[1:-1]
    return np.diff(np.interp(span, np.maximum.accumulate(corners), spent))


def _values(table: pd.DataFrame, name: str) -> np.ndarray:
    return table[name].astype("float64").to_numpy(dtype="float64", na_value=np.nan)


def _column(samples: pd.DataFrame, name: str) -> np.ndarray | None:
    """Of each sample but the first; None unless all have it."""
    values = _values(samples, name)[1:]
    return None if np.isnan(values).any() else values


def _gain(samples: pd.DataFrame, name: str) -> np.ndarray | None:
    """What a counter gained from sample to sample. A process that began anew counts from 0."""
    values = _values(samples, name)
    if np.isnan(values).any():
        return None
    gained = np.diff(values)
    return np.where(gained < 0, values[1:], gained)


def _rate(samples: pd.DataFrame, name: str, unit: float, lasted: np.ndarray) -> np.ndarray | None:
    gained = _gain(samples, name)
    return None if gained is None else gained * unit / lasted


def _mean(values: np.ndarray | None, lasted: np.ndarray) -> float | None:
    return None if values is None or not len(values) else float(np.average(values, weights=lasted))


def _worst(values: np.ndarray | None, lasted: np.ndarray) -> float | None:
    if values is None:
        return None
    return max((float(np.average(values[part], weights=lasted[part])) for part in _parts(len(values))), default=None)


def _worst_share(spent: np.ndarray | None, possible: np.ndarray) -> float | None:
    """Of the parts of the window, the largest share of what was possible. A part with hardly any step tells nothing."""
    if spent is None:
        return None
    least = RARELY * possible.sum() / PARTS
    parts = [(spent[part].sum(), possible[part].sum()) for part in _parts(len(spent))]
    return max((min(1.0, float(one / whole)) for one, whole in parts if whole >= least), default=0.0)


def _parts(count: int) -> list[np.ndarray]:
    return [part for part in np.array_split(np.arange(count), PARTS) if len(part)]
