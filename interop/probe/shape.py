"""The model's cost coefficients from the sizes in its config. Weights and attention as in common decoders."""

from collections.abc import Mapping

from sojourn.interop.probe.records import Setting
from sojourn.metrics.compute.cost_model import ExpertShape, ModelShape

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def shape_of(sizes: Mapping[str, Setting]) -> ModelShape | None:
    """None where the sizes are not those of a decoder with grouped-query attention, such as one with latents."""
    if not all(isinstance(sizes.get(name), int) for name in NEEDED) or sizes.get("kv_lora_rank"):
        return None
    number = {name: value for name, value in sizes.items() if isinstance(value, int)}
    hidden, layers, heads = number["hidden_size"], number["num_hidden_layers"], number["num_attention_heads"]
    head_dim = number.get("head_dim") or hidden // heads
    kv_heads = number.get("num_key_value_heads") or heads
    each, kv_each = number.get("weight_bytes_each", 2), number.get("kv_bytes_each", 2)
    attention = layers * hidden * head_dim * (2 * heads + 2 * kv_heads)
    gated = 3 * hidden * number["intermediate_size"]
    experts, mlp, read = None, layers * gated, layers * gated
    count = next((number[name] for name in EXPERTS if number.get(name)), 0)
    if count:
        one = 3 * hidden * (number.get("moe_intermediate_size") or number["intermediate_size"])
        chosen = number.get("num_experts_per_tok", 1)
        experts = ExpertShape(layers, count, chosen, one * each)
        mlp, read = layers * (chosen * one + hidden * count), layers * hidden * count
    window = number.get("sliding_window") or None
    return ModelShape(
        vocab_size=number["vocab_size"], hidden_size=hidden, attention_parameters=attention, mlp_parameters=mlp,
        pair_flops=4 * heads * head_dim, windows=((window, layers),),
        kv_bytes_per_token=2 * layers * kv_heads * head_dim * kv_each,
        weight_bytes=(attention + read + hidden * number["vocab_size"]) * each, experts=experts,
    )  # fmt: skip
