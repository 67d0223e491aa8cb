"""A recorded server to size: its steps, and its settings, as which it is deployed."""

from typing import Any

from sojourn.engine.config import largest_step_tokens
from sojourn.metrics.run.directory import RunDirectory, section
from sojourn.replay.device.estimate import Deployment
from sojourn.replay.device.recorded_steps import RecordedSteps, of_model, recorded_steps
from sojourn.replay.settings import recorded_config

SETTINGS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_prefill_chunk_tokens",
    "policy",
    "block_size",
    "num_kv_blocks",
)


def recorded_server(run: RunDirectory, asked: Deployment) -> tuple[RecordedSteps, dict[str, Any]]:
    """Of `asked` only the model counts. Raises ReplayError where the run shows neither, or is of another model or
    degree."""
    steps = recorded_steps(run, of_model(run, asked), with_host=True)
    meta = run.meta()
    config = recorded_config(meta)
    settings = {name: getattr(config, name) for name in SETTINGS}
    if settings["max_num_batched_tokens"] == "auto":
        is_gpu = section(meta, "core").get("device", "cpu") != "cpu"
        settings["max_num_batched_tokens"] = largest_step_tokens(config, "cuda" if is_gpu else "cpu")
    return steps, settings
