"""gpt-oss (OpenAI, 2025): every second layer has a window, each head a sink logit, and each layer a mixture of experts
with biases and a clamped gate."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from sojourn.engine.compute.operations.reference import GATE_LIMIT, SWISH_GAIN, clamped_swish_gate
from sojourn.engine.compute.quantisation.matrix import QuantisedMatrix
from sojourn.engine.token.models.layer import DecoderConfig, Stored
from sojourn.engine.token.models.llama import grouped_decoder
from sojourn.engine.token.models.moe import MixtureOfExperts, softmax_top_k
from sojourn.engine.token.models.settings import count, expert_counts, layer_windows, refuse_unless

ROPE = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096}  # fmt: skip
DEFAULTS = {"head_dim": 64, "rope_theta": 150_000.0, "sliding_window": 128, "rms_norm_eps": 1e-5}


def decoder_config(config: dict[str, Any]) -> DecoderConfig:
    """config.json of GptOssForCausalLM."""
    refuse_unless(config, hidden_act="silu", swiglu_alpha=SWISH_GAIN, swiglu_limit=GATE_LIMIT)
    config = DEFAULTS | config
    if not config.get("rope_parameters") and not config.get("rope_scaling"):
        config["rope_parameters"] = ROPE | {"rope_theta": config["rope_theta"]}
    num_layers = count(config, "num_hidden_layers")
    if config.get("layer_types") is None:
        config["layer_types"] = ["full_attention" if index % 2 else "sliding_attention" for index in range(num_layers)]
    num_experts, chosen = expert_counts(config, "num_local_experts")
    mixture = partial(
        MixtureOfExperts,
        count(config, "hidden_size"),
        count(config, "intermediate_size"),
        num_experts,
        chosen,
        partial(softmax_top_k, num_chosen=chosen, normalise=True),
        router_bias=True,
        gate=clamped_swish_gate,
        bias=True,
    )
    bias = bool(config.get("attention_bias", True))
    return grouped_decoder(
        config,
        (mixture,) * num_layers,
        windows=layer_windows(config, num_layers),
        qkv_bias=bias,
        output_bias=bias,
        sinks=True,
        translate=_translate,
    )


def _translate(name: str, tensor: Stored) -> Iterator[tuple[str, Stored]]:
    """All experts stand in one tensor: a weight as [num_experts, in, out], or quantised as [num_experts, out, in]. The
    outputs of gate and up alternate."""
    stem, _, part = name.replace(".mlp.router.", ".mlp.gate.").rpartition(".experts.")
    if not stem:
        yield name.replace(".mlp.router.", ".mlp.gate."), tensor
        return
    kind = "bias" if part.endswith("_bias") else "weight"
    projection = part.removesuffix("_bias")
    if projection not in ("gate_up_proj", "down_proj") or tensor.dim() != (2 if kind == "bias" else 3):
        yield name, tensor  # of no place: refused by its name
        return
    names = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[projection]
    for index in range(tensor.shape[0]):
        for first, target in enumerate(names):
            rows = _rows(tensor, index, first, len(names))
            yield f"{stem}.experts.{index}.{target}.{kind}", rows


def _rows(stack: Stored, expert: int, first: int, step: int) -> Stored:
    """Each `step`-th output of an expert, from `first` on."""
    if isinstance(stack, QuantisedMatrix):
        return stack.reordered_rows(expert).reordered_rows(slice(first, None, step))
    one = stack[expert]
    return one[first::step] if one.dim() == 1 else one.t()[first::step]
