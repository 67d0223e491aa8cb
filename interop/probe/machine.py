"""Seconds of the machine from a probe's samples: what the engine's loop and the front had of the cores, and others."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from sojourn.interop.probe.records import Sample
from sojourn.interop.probe.stream import Stream
from sojourn.metrics.records import SystemRecord

_COUNTED = ("cpu_ns", "loop_cpu_ns", "loop_queued_ns", "queued_ns", "loop_involuntary_switches", "rss_bytes")


def system_records(cores: Sequence[Stream], fronts: Sequence[Stream]) -> list[SystemRecord]:
    """At the moments of the cores' samples; the front's counters, read at moments of their own, lie on a line between
    two of them."""
    fronts_ns = [_at_moments(stream.samples) for stream in fronts if len(stream.samples) > 1]
    records = []
    for core in cores:
        for before, after in pairwise(core.samples):
            front = next((found for found in fronts_ns if found["ns"][0] <= after.ns <= found["ns"][-1]), None)
            records.append(_record(before, after, front))
    return records


def _at_moments(samples: Sequence[Sample]) -> dict[str, np.ndarray]:
    return {name: np.array([getattr(each, name) for each in samples], float) for name in ("ns", *_COUNTED)}


def _record(before: Sample, after: Sample, front: dict[str, np.ndarray] | None) -> SystemRecord:
    whole = max(after.machine_whole_ns - before.machine_whole_ns, 1)
    lasted = max(after.ns - before.ns, 1)
    of_front = {}
    if front is not None:
        now = {name: int(np.interp(after.ns, front["ns"], front[name])) for name in _COUNTED}
        earlier = np.interp(before.ns, front["ns"], front["cpu_ns"])
        of_front = {
            "front_cpu_seconds": now["cpu_ns"] / 1e9, "front_rss_bytes": now["rss_bytes"],
            "front_loop_cpu_ns": now["loop_cpu_ns"], "front_loop_queued_ns": now["loop_queued_ns"],
            "front_queued_ns": now["queued_ns"], "front_involuntary_switches": now["loop_involuntary_switches"],
        }  # fmt: skip
    return SystemRecord(
        ns=after.ns,
        host_cpu_percent=100 * (after.machine_busy_ns - before.machine_busy_ns) / whole,
        host_steal_percent=100 * (after.machine_steal_ns - before.machine_steal_ns) / whole,
        front_cpu_percent=None if front is None else 100 * (now["cpu_ns"] - earlier) / lasted,
        core_cpu_percent=100 * (after.cpu_ns - before.cpu_ns) / lasted,
        core_cpu_seconds=after.cpu_ns / 1e9,
        core_rss_bytes=after.rss_bytes,
        core_loop_cpu_ns=after.loop_cpu_ns,
        core_loop_queued_ns=after.loop_queued_ns,
        core_queued_ns=after.queued_ns,
        core_involuntary_switches=after.loop_involuntary_switches,
        host_available_bytes=None,
        **of_front,
    )
