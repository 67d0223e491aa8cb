"""Which exchange the ranks with experts use: chosen before they load, since they hold other weights for each."""

from pathlib import Path

import torch

from sojourn.engine.config import EngineConfig, largest_step_tokens
from sojourn.engine.runner.build import chosen_device, chosen_dtypes
from sojourn.engine.token.models.registry import outlined_model
from sojourn.metrics.compute.communication import cheaper_exchange, group_shape
from sojourn.metrics.compute.roofline import device_name, load_ceilings
from sojourn.metrics.errors import CalibrationError


def with_exchange(config: EngineConfig, folder: Path) -> EngineConfig:
    """The settings with `expert_exchange` chosen, for all ranks of a group. Raises ModelError."""
    if config.expert_exchange != "auto":
        return config
    return config.model_copy(update={"expert_exchange": _cheaper(config, folder)})


def _cheaper(config: EngineConfig, folder: Path) -> str:
    """By the links as they were measured, for a step of decodes and for the largest step."""
    if config.expert_parallel == 1 or config.tensor_parallel > 1 or config.graphs == "on":
        return "all-reduce"
    device = chosen_device(config)
    try:
        links = load_ceilings(device_name(torch.cuda.get_device_name() if device.type == "cuda" else None)).links
    except CalibrationError:
        return "all-reduce"
    dtype, _ = chosen_dtypes(config, device)
    outline = outlined_model(folder, dtype, device, config.max_model_len, dummy=config.load_format == "dummy")
    name = str(dtype).removeprefix("torch.")
    group = group_shape(outline.model.shape(), dict(config), name, is_of_rank=False)
    return cheaper_exchange(group, links, (config.max_num_seqs, largest_step_tokens(config, device.type)))
