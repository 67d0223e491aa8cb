"""Which layers of a config.json keep the keys and values of all tokens, of a window, or a state of fixed size."""

from collections.abc import Mapping
from typing import Any, Literal

Layer = Literal["full", "window", "state", "none"]
KINDS: dict[str, Layer] = {  # a layer's name in `layer_types`, `layers_block_type` or a pattern
    "full_attention": "full", "attention": "full", "*": "full", "sliding_attention": "window", "chunked_attention":
    "window", "linear_attention": "state", "mamba": "state", "mamba2": "state", "M": "state", "recurrent": "state",
    "conv": "state", "-": "none", "mlp": "none", "moe": "none", "E": "none",
}  # fmt: skip
# Without `layer_types`, each layer has a window but every so many-th.
USUAL_PATTERN = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "gpt_oss": 2}
ALL_SLIDE = ("mistral", "mixtral", "phi3", "starcoder2")


def layers_of(config: Mapping[str, Any], count: int) -> list[Layer]:
    """Of each of `count` layers. Raises ValueError where their kinds cannot be told."""
    listed = config.get("layer_types") or config.get("layers_block_type") or config.get("hybrid_override_pattern")
    if listed:
        kinds = [KINDS.get(str(each)) for each in listed]
        if len(kinds) != count:
            raise ValueError(f"it lists {len(kinds)} layers and counts {count}")
        known = [kind for kind in kinds if kind is not None]
        if len(known) < count:
            raise ValueError("a kind of its layers is not known here")
        return known
    if every := number(config, "full_attention_interval"):
        return _each(every, count, "full", "state")
    if every := number(config, "attn_layer_period"):
        offset = number(config, "attn_layer_offset")
        return ["full" if place % every == offset else "state" for place in range(count)]
    if config.get("model_type") in ("mamba", "mamba2", "falcon_mamba", "rwkv"):
        return ["state"] * count
    if any(name.startswith(("mamba_", "ssm_", "linear_conv", "linear_num", "linear_key")) for name in config):
        raise ValueError("some of its layers keep a state, and which is not in it")
    if config.get("attention_chunk_size"):  # Llama 4: every fourth layer has no rotation, and sees all
        return _each(number(config, "no_rope_layer_interval") or 4, count, "full", "window")
    return _sliding(config, count)


def _sliding(config: Mapping[str, Any], count: int) -> list[Layer]:
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return ["full"] * count
    if every := number(config, "sliding_window_pattern") or USUAL_PATTERN.get(str(config.get("model_type")), 0):
        return _each(every, count, "full", "window")
    if config.get("use_sliding_window"):
        full = min(count, number(config, "max_window_layers"))
        return ["full" if place < full else "window" for place in range(count)]
    if config.get("model_type") in ALL_SLIDE:
        return ["window"] * count
    raise ValueError("which of its layers have a sliding window is not in it")


def _each(every: int, count: int, chosen: Layer, others: Layer) -> list[Layer]:
    return [others if (place + 1) % every else chosen for place in range(count)]


def number(config: Mapping[str, Any], *names: str) -> int:
    """The first of `names` that is a whole number; 0 without one, and for one below 0."""
    value = next((config[name] for name in names if isinstance(config.get(name), int)), 0)
    return 0 if isinstance(value, bool) or value < 0 else value
