"""Rotary frequencies, as config.json asks for them."""

import math
from typing import Any

import torch

from engine.token.checkpoint import ModelError


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """The rope settings in one form: transformers 5 writes `rope_parameters`, older ones two keys."""
    new, old = config.get("rope_parameters"), config.get("rope_scaling") or {}
    parameters = dict(new or old)
    parameters.setdefault("rope_theta", config.get("rope_theta", 10_000.0))
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    return parameters


def rope_table(config: dict[str, Any], head_dim: int, max_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every position, each [max_len, head_dim], float32."""
    parameters = rope_parameters(config)
    frequencies = 1.0 / parameters["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if parameters["rope_type"] == "llama3":
        frequencies = _llama3(frequencies, parameters)
    elif parameters["rope_type"] != "default":
        raise ModelError(f"rope type {parameters['rope_type']!r} is not supported; supported are default and llama3")
    angles = torch.arange(max_len, dtype=torch.int64).float()[:, None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def _llama3(frequencies: torch.Tensor, parameters: dict[str, Any]) -> torch.Tensor:
    """Llama 3.1's scaling: long wavelengths are divided by `factor`, short ones kept, those between blended."""
    original = parameters["original_max_position_embeddings"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    wavelengths = 2 * math.pi / frequencies
    blend = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * frequencies / parameters["factor"] + blend * frequencies
