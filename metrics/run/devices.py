"""How many devices computed the model of a run. Pure functions over `run.json`."""

from collections.abc import Mapping
from typing import Any

from sojourn.metrics.run.directory import engine_settings

GROUP = ("tensor_parallel", "pipeline_parallel", "expert_parallel")


def num_ranks(meta: Mapping[str, Any]) -> int:
    """Processes of one server that compute the model: the samples of the core are those of all."""
    settings = engine_settings(dict(meta))
    tensor, pipeline, expert = (int(settings.get(name) or 1) for name in GROUP)
    return pipeline * max(tensor, expert)


def num_devices(meta: Mapping[str, Any]) -> int | None:
    """Devices of all servers; a CPU is one for each process that computes on it. None where the server does not report
    its group of ranks."""
    settings = engine_settings(dict(meta))
    if not any(settings.get(name) for name in GROUP):
        return None
    servers = int(settings.get("replicas") or len(meta.get("servers") or ()) or 1)
    return num_ranks(meta) * servers * int(settings.get("data_parallel_size") or 1)
