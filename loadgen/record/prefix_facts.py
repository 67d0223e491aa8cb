"""What an infinite prefix cache would have found in the requests that a run has sent, which only its end can tell."""

from typing import TYPE_CHECKING, Any

from loadgen.scenario.workload import Workload
from loadgen.schedule.ideal_prefix_hits import ideal_hit_rate
from metrics.run.directory import RunDirectory, engine_settings
from metrics.sources.view import reported_settings

if TYPE_CHECKING:
    from loadgen.record.parse import Parsed

ASSUMED_BLOCK_TOKENS = 16  # of our engine and of vLLM, unless they are told otherwise


def with_prefix(run: RunDirectory, meta: dict[str, Any], parsed: "Parsed") -> dict[str, Any]:
    """The run's `workload` with `prefix`, where its requests share anything."""
    workload = Workload(**meta["scenario"]["workload"])
    told = cache_block_tokens(run, meta)
    found = ideal_hit_rate(workload, parsed.sent, parsed.measured, told or ASSUMED_BLOCK_TOKENS)
    prefix = {} if found is None else {"prefix": found | {"block_tokens_assumed": told is None}}
    return (meta.get("workload") or {}) | prefix


def cache_block_tokens(run: RunDirectory, meta: dict[str, Any]) -> int | None:
    """Tokens of a block of the server's cache, as it was started or as it says itself; None where nobody tells."""
    told = engine_settings(meta).get("block_size") or reported_settings(run).get("block_size")
    try:
        return max(1, int(told))
    except (TypeError, ValueError):  # a foreign server may call it "auto"
        return None
