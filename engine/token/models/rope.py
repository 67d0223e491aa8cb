"""Rotary frequencies, as config.json asks for them.

A key is rotated once, when it is written, and stays in the cache for all requests that share its block. So its angle
may depend on its position alone. Dynamic NTK breaks that rule: its base grows with the length of the sequence, and
transformers leaves cached keys with the base of their time. Here the base is that of `max_model_len`, fixed. Up to the
model's `max_position_embeddings`, the default, dynamic NTK changes nothing and the tokens are those of transformers. A
larger `max_model_len` gives, at every length, the angles that transformers gives a prompt of that length.
"""

import math
from typing import Any

import torch

from sojourn.engine.token.models.settings import count, number, section
from sojourn.engine.token.models.yarn import yarn_mscale
from sojourn.metrics.errors import ModelError

TYPES = ("default", "linear", "dynamic", "yarn", "llama3")


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """The rope settings in one form: transformers 5 writes `rope_parameters`, older ones two keys. Model cards tell
    users to add `rope_scaling`, which counts before what stands there."""
    parameters = section(config, "rope_scaling") or section(config, "rope_parameters")
    parameters = parameters | {}  # a copy
    if any(isinstance(value, dict) for value in parameters.values()):
        raise ModelError("config.json has rope_parameters for each kind of layer; only one for all is supported")
    parameters.setdefault("rope_theta", config.get("rope_theta") or 10_000.0)
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    if parameters["rope_type"] not in TYPES:
        raise ModelError(f"rope type {parameters['rope_type']!r} is not supported; supported are {', '.join(TYPES)}")
    if (parameters.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelError(f"partial_rotary_factor={parameters['partial_rotary_factor']} is not supported, only 1.0")
    longest = count(config, "max_position_embeddings")
    original = config.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
    parameters["original_max_position_embeddings"] = original or longest
    number(parameters, "original_max_position_embeddings", least=1.0)
    for key in ("attention_factor", "mscale", "mscale_all_dim"):
        number(parameters, key, default=0.0, least=0.0)
    for key in ("beta_fast", "beta_slow"):
        number(parameters, key, default=1.0, least=1e-6)
    if parameters["rope_type"] == "yarn" and parameters.get("factor") is None:
        parameters["factor"] = longest / parameters["original_max_position_embeddings"]
    number(parameters, "rope_theta", least=1.5)  # YaRN divides by its logarithm
    if parameters["rope_type"] != "default":
        number(parameters, "factor", least=1.0)
    if parameters["rope_type"] == "llama3":
        low = number(parameters, "low_freq_factor")
        if number(parameters, "high_freq_factor") <= low:
            raise ModelError(f"high_freq_factor={parameters['high_freq_factor']} must be above low_freq_factor={low}")
    return parameters


def refuse_odd(head_dim: int) -> None:
    if head_dim % 2:
        raise ModelError(f"config.json asks for {head_dim} dimensions of a head, which cannot be rotated in pairs")


def length_limits(config: dict[str, Any]) -> tuple[int, int]:
    """max_model_len by default, and the most that it may be set to."""
    parameters, longest = rope_parameters(config), count(config, "max_position_embeddings")
    if parameters["rope_type"] == "yarn":  # configs name either the original or the stretched length
        longest = max(longest, int(parameters["original_max_position_embeddings"] * number(parameters, "factor")))
    if parameters["rope_type"] == "dynamic":
        return longest, int(longest * number(parameters, "factor"))
    return longest, longest


def rope_table(config: dict[str, Any], dim: int, max_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every position, each [max_len, dim], float32, times the attention factor (YaRN)."""
    frequencies, attention_factor = rope_frequencies(config, dim, max_len)
    angles = torch.arange(max_len, dtype=torch.int64).float()[:, None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos() * attention_factor, angles.sin() * attention_factor


def rope_frequencies(config: dict[str, Any], dim: int, max_len: int) -> tuple[torch.Tensor, float]:
    """Radians per position of each pair of dimensions, [dim // 2], and the factor of cos and sin."""
    parameters = rope_parameters(config)
    base, kind = number(parameters, "rope_theta"), parameters["rope_type"]
    if kind == "dynamic":  # bloc97 and emozilla, 2023
        if dim < 4:
            raise ModelError(f"config.json asks for {dim} dimensions of a head; rope type dynamic needs at least 4")
        longest = count(config, "max_position_embeddings")
        factor = number(parameters, "factor")
        base *= (factor * max(max_len, longest) / longest - (factor - 1)) ** (dim / (dim - 2))
    frequencies = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    if kind == "linear":  # Chen et al., 2023
        return frequencies / number(parameters, "factor"), 1.0
    if kind == "llama3":
        return _llama3(frequencies, parameters), 1.0
    if kind == "yarn":
        return _yarn(frequencies, parameters, dim), _yarn_attention_factor(parameters)
    return frequencies, 1.0


def _llama3(frequencies: torch.Tensor, parameters: dict[str, Any]) -> torch.Tensor:
    """Llama 3.1's scaling: long wavelengths are divided by `factor`, short ones stay, those between are blended."""
    original = parameters["original_max_position_embeddings"]
    low, high = number(parameters, "low_freq_factor"), number(parameters, "high_freq_factor")
    wavelengths = 2 * math.pi / frequencies
    blend = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * frequencies / number(parameters, "factor") + blend * frequencies


def _yarn(frequencies: torch.Tensor, parameters: dict[str, Any], dim: int) -> torch.Tensor:
    """YaRN (Peng et al., 2023): dimensions that turn less than `beta_slow` times in the original context are divided by
    `factor`, those that turn more than `beta_fast` times stay, those between are blended."""

    def dimension(turns: float) -> float:
        original = parameters["original_max_position_embeddings"]
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(parameters["rope_theta"]))

    low, high = dimension(parameters.get("beta_fast") or 32), dimension(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2).float() - low) / (high - low or 0.001)).clamp(0, 1)
    return ramp * frequencies / number(parameters, "factor") + (1 - ramp) * frequencies


def _yarn_attention_factor(parameters: dict[str, Any]) -> float:
    attention_factor, factor = parameters.get("attention_factor"), number(parameters, "factor")
    if attention_factor is not None:
        return float(attention_factor)
    mscale, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    return yarn_mscale(factor)
