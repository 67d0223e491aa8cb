"""Reads config.json for the families: what is missing, of another kind, or not supported becomes a sentence."""

import math
from typing import Any

from metrics.errors import ModelError

# Keys that change what a model computes, in ways that no family here does, and the values that change nothing.
NEUTRAL = {
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "logit_scale": None,
    "partial_rotary_factor": 1.0,
    "is_encoder_decoder": False,
}


def count(config: dict[str, Any], key: str, default: int | None = None, least: int = 1) -> int:
    """A whole number of config.json; `default` where it has none, or null."""
    value = _value(config, key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ModelError(f"config.json has {key}={value!r}; it must be a whole number of at least {least}")
    return value


def number(config: dict[str, Any], key: str, default: float | None = None, least: float | None = None) -> float:
    """A number of config.json; `default` where it has none, or null."""
    value = _value(config, key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ModelError(f"config.json has {key}={value!r}; it must be a number")
    if least is not None and value < least:
        raise ModelError(f"config.json has {key}={value!r}; it must be at least {least}")
    return float(value)


def _value(config: dict[str, Any], key: str, default: float | None) -> Any:
    value = config.get(key)
    if value is None and default is None:
        raise ModelError(f"config.json lacks {key}")
    return default if value is None else value


def expert_counts(config: dict[str, Any], key: str, default: int | None = None) -> tuple[int, int]:
    """The number of experts, which `key` says, and of those that a token is sent to."""
    experts, chosen = count(config, key, default), count(config, "num_experts_per_tok")
    if chosen > experts:
        raise ModelError(f"config.json has num_experts_per_tok={chosen}, more than {key}={experts}")
    return experts, chosen


def section(config: dict[str, Any], key: str) -> dict[str, Any]:
    """An object within config.json; {} where it has none, or null."""
    return _of_kind(config, key, dict, "an object")


def listed(config: dict[str, Any], key: str) -> list[Any]:
    """A list of config.json; [] where it has none, or null."""
    return _of_kind(config, key, list, "a list")


def _of_kind(config: dict[str, Any], key: str, kind: type, description: str) -> Any:
    value = config.get(key)
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise ModelError(f"config.json has {key}={value!r}; it must be {description}")
    return value


def refuse_unless(config: dict[str, Any], **expected: Any) -> None:
    """Refuses a key whose value is not the one that this family is built for."""
    for key, value in expected.items():
        if config.get(key, value) != value:
            raise ModelError(f"config.json has {key}={config[key]!r}; only {value!r} is supported for this family")


def layer_windows(config: dict[str, Any], num_layers: int, first: int = 0) -> tuple[int | None, ...]:
    """The sliding window of each layer. `layer_types` says which slide; without it, those from `first` on do."""
    window = config.get("sliding_window")
    if window is not None:
        window = count(config, "sliding_window")
    types = listed(config, "layer_types")
    if not types:
        return tuple(window if index >= first else None for index in range(num_layers))
    if len(types) != num_layers:
        raise ModelError(f"config.json has {len(types)} layer_types for {num_layers} layers")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise ModelError(
                f"layer type {kind!r} is not supported; supported are full_attention and sliding_attention"
            )
        if kind == "sliding_attention" and window is None:
            raise ModelError("config.json has layers of sliding_attention, but no sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in types)
