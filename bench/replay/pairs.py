"""The pairs: a workload, and the settings that a replay of its run is asked about before they are run."""

from pathlib import Path
from typing import Any

SCENARIOS = Path(__file__).parent / "scenarios"
BASE: dict[str, Any] = {}
PAIRS: dict[str, list[dict[str, Any]]] = {
    "kv-pressure": [
        {"num_kv_blocks": 128}, {"num_kv_blocks": 40}, {"max_num_seqs": 3}, {"block_size": 8}, {"max_num_seqs": 8},
    ],
    "shared-prefixes": [
        {"prefix_caching": False}, {"num_kv_blocks": 120}, {"max_num_seqs": 2}, {"max_num_batched_tokens": 128},
    ],
    "sessions": [
        {"prefix_caching": False}, {"num_kv_blocks": 100}, {"max_num_seqs": 2}, {"max_num_batched_tokens": 64},
    ],
    "burst": [
        {"max_num_seqs": 2}, {"max_num_seqs": 16}, {"policy": "shortest-prefill-first"}, {"policy": "prefill-first"},
        {"max_num_batched_tokens": 96},
    ],
    "documents-beside-chat": [
        {"max_num_batched_tokens": 128}, {"max_num_batched_tokens": 1024}, {"max_prefill_chunk_tokens": 128},
        {"policy": "shortest-prefill-first"}, {"max_long_prefills": 1, "long_prefill_tokens": 1000},
    ],
    "agents": [{"max_num_seqs": 2}, {"prefix_caching": False}, {"num_kv_blocks": 260}],
}  # fmt: skip


def label(settings: dict[str, Any]) -> str:
    """Name of a setting, also of its folders."""
    return ",".join(f"{name}={value}" for name, value in settings.items()) or "base"
