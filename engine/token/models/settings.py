"""Reads config.json for the families: what is missing, of another kind, or not supported becomes a sentence."""

from typing import Any

from sojourn.metrics.errors import ModelError

# Keys that change what a model computes, in ways that few families here do or none, and the values that change nothing.
NEUTRAL = {
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "logit_scale": None,
    "partial_rotary_factor": 1.0,
    "rotary_pct": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "attention_multiplier": None,
    "query_pre_attn_scalar": None,
    "no_rope_layers": None,
    "attention_chunk_size": None,
    "alibi": False,
    "is_encoder_decoder": False,
}

# The largest values that can be meant: a hundred times those of published models, or more. Above them even a model
# without weights takes minutes to outline.
MOST_LAYERS = 1024
MOST_BY_DEFAULT = 1 << 24  # of a size, a vocabulary, or a number of heads or experts
MOST_POSITIONS = 1 << 30
MOST = dict.fromkeys(("num_hidden_layers", "n_layers"), MOST_LAYERS) | dict.fromkeys(
    ("max_position_embeddings", "max_seq_len", "sliding_window"), MOST_POSITIONS
)
MOST_NUMBER = 1e18  # a product of two is still a float32
SHOWN = 100  # characters of a value in a sentence


def count(config: dict[str, Any], key: str, default: int | None = None, least: int = 1) -> int:
    """A whole number of config.json; `default` where it has none, or null."""
    value = _value(config, key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ModelError(f"config.json has {key}={shown(value)}; it must be a whole number of at least {least}")
    if value > (most := MOST.get(key, MOST_BY_DEFAULT)):
        raise ModelError(f"config.json has {key}={shown(value)}; it must be at most {most:,}")
    return value


def shown(value: Any) -> str:
    """A value of a file, short enough for a sentence."""
    text = str(value) if isinstance(value, float) else repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def number(config: dict[str, Any], key: str, default: float | None = None, least: float | None = None) -> float:
    """A number of config.json; `default` where it has none, or null."""
    value = _value(config, key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < MOST_NUMBER:
        raise ModelError(f"config.json has {key}={shown(value)}; it must be a number, and below {MOST_NUMBER:g}")
    if least is not None and value < least:
        raise ModelError(f"config.json has {key}={shown(value)}; it must be at least {least}")
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
        raise ModelError(f"config.json has {key}={shown(value)}; it must be {description}")
    return value


def refuse_unless(config: dict[str, Any], **expected: Any) -> None:
    """Refuses a key whose value is not the one that this family is built for."""
    for key, value in expected.items():
        if config.get(key, value) != value:
            raise ModelError(f"config.json has {key}={shown(config[key])}; only {value!r} is supported for this family")


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
