"""DeepSeek-V2 and V3: latent attention, and a mixture of experts that are chosen by groups, beside shared ones."""

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from sojourn.engine.token.models.expansion import Expander
from sojourn.engine.token.models.latent import LatentAttention, LatentConfig
from sojourn.engine.token.models.layer import DecoderConfig
from sojourn.engine.token.models.llama import gated_mlps, rotary_decoder
from sojourn.engine.token.models.moe import MixtureOfExperts, Route, split_experts
from sojourn.engine.token.models.rope import refuse_odd, rope_parameters
from sojourn.engine.token.models.settings import count, expert_counts, number, refuse_unless
from sojourn.engine.token.models.yarn import yarn_mscale
from sojourn.metrics.errors import ModelError


def v2_config(config: dict[str, Any]) -> DecoderConfig:
    """config.json of DeepseekV2ForCausalLM."""
    refuse_unless(config, scoring_func="softmax", norm_topk_prob=False, mlp_bias=False)
    method = config.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelError(f"config.json has topk_method={method!r}; supported are greedy and group_limited_greedy")
    groups, topk_groups = (1, 1) if method == "greedy" else _groups(config)
    chosen, scale = count(config, "num_experts_per_tok"), number(config, "routed_scaling_factor", 1.0)
    route = partial(softmax_by_group, num_chosen=chosen, num_groups=groups, topk_groups=topk_groups, scale=scale)
    return _decoder(config, route, correction_bias=False, interleaved=True)


def v3_config(config: dict[str, Any]) -> DecoderConfig:
    """config.json of DeepseekV3ForCausalLM."""
    refuse_unless(config, scoring_func="sigmoid", topk_method="noaux_tc")
    groups, topk_groups = _groups(config)
    if groups * 2 > count(config, "n_routed_experts"):
        raise ModelError(f"config.json has n_group={groups}; a group is judged by two experts and has fewer")
    route = partial(
        sigmoid_by_group,
        num_chosen=count(config, "num_experts_per_tok"),
        num_groups=groups,
        topk_groups=topk_groups,
        normalise=bool(config.get("norm_topk_prob", True)),
        scale=number(config, "routed_scaling_factor", 1.0),
    )
    interleaved = bool(config.get("rope_interleave", True))
    return _decoder(config, route, correction_bias=True, interleaved=interleaved)


def softmax_by_group(
    logits: torch.Tensor, bias: None, num_chosen: int, num_groups: int, topk_groups: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities of the best experts, out of the groups whose best expert is best (DeepSeek-V2)."""
    scores = logits.softmax(-1)
    best = scores.unflatten(-1, (num_groups, -1)).amax(-1)
    weights, experts = _only_groups(scores, best, topk_groups, 0.0).topk(num_chosen, dim=-1)
    return weights * scale, experts


def sigmoid_by_group(
    logits: torch.Tensor,
    bias: torch.Tensor,
    num_chosen: int,
    num_groups: int,
    topk_groups: int,
    normalise: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best experts out of the groups whose two best sum highest. The bias, which balances load, takes part in the
    choice, but not in the weights (DeepSeek-V3, section 2.1.2)."""
    scores = logits.sigmoid()
    biased = scores + bias
    best = biased.unflatten(-1, (num_groups, -1)).topk(2, dim=-1).values.sum(-1)
    experts = _only_groups(biased, best, topk_groups, float("-inf")).topk(num_chosen, dim=-1).indices
    weights = scores.gather(-1, experts)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, experts


def _only_groups(scores: torch.Tensor, group_scores: torch.Tensor, topk_groups: int, other: float) -> torch.Tensor:
    """`scores` [num_tokens, num_experts] with `other` outside the best `topk_groups`."""
    num_groups = group_scores.shape[-1]
    if topk_groups == num_groups:
        return scores
    chosen = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(
        -1, group_scores.topk(topk_groups, dim=-1).indices, True
    )
    return scores.masked_fill(~chosen.repeat_interleave(scores.shape[-1] // num_groups, dim=-1), other)


def _groups(config: dict[str, Any]) -> tuple[int, int]:
    """Number of groups and how many of them a token may use."""
    groups, topk_groups = count(config, "n_group"), count(config, "topk_group")
    experts, chosen = count(config, "n_routed_experts"), count(config, "num_experts_per_tok")
    if experts % groups or topk_groups > groups or chosen > topk_groups * (experts // groups):
        raise ModelError(
            f"config.json has n_group={groups}, topk_group={topk_groups}, n_routed_experts={experts}, "
            f"num_experts_per_tok={chosen}; groups must divide the experts and those kept must hold the chosen"
        )
    return groups, topk_groups


def _decoder(config: dict[str, Any], route: Route, *, correction_bias: bool, interleaved: bool) -> DecoderConfig:
    refuse_unless(config, moe_layer_freq=1)
    if config.get("q_lora_rank") is None:
        refuse_unless(config, attention_bias=False)  # it would be of half a projection
    num_experts, chosen = expert_counts(config, "n_routed_experts")
    dense = gated_mlps(config)
    first_mixture = count(config, "first_k_dense_replace", 0, least=0)
    shared = count(config, "n_shared_experts", 0, least=0)
    intermediate_size = count(config, "moe_intermediate_size")
    mixture = partial(
        MixtureOfExperts,
        count(config, "hidden_size"),
        intermediate_size,
        num_experts,
        chosen,
        route,
        shared_intermediate_size=shared * intermediate_size,
        correction_bias=correction_bias,
    )
    nope_dim, rope_dim = count(config, "qk_nope_head_dim"), count(config, "qk_rope_head_dim")
    refuse_odd(rope_dim)
    attention = LatentConfig(
        hidden_size=count(config, "hidden_size"),
        num_heads=count(config, "num_attention_heads"),
        query_rank=count(config, "q_lora_rank") if config.get("q_lora_rank") is not None else None,
        latent_dim=count(config, "kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=count(config, "v_head_dim"),
        scale=(nope_dim + rope_dim) ** -0.5 * _sharpening(config),
        bias=bool(config.get("attention_bias")),
        interleaved=interleaved,
    )
    mlps = dense[:first_mixture] + (mixture,) * (len(dense) - first_mixture)
    translate = partial(_translate, num_layers=len(dense))
    windows = (None,) * len(dense)
    make = partial(LatentAttention, attention, Expander(nope_dim + rope_dim))
    return rotary_decoder(config, make, mlps, windows=windows, translate=translate)


def _sharpening(config: dict[str, Any]) -> float:
    """YaRN's temperature, which DeepSeek applies to the whole product: queries and keys once each."""
    parameters = rope_parameters(config)
    weight = parameters.get("mscale_all_dim")
    if parameters["rope_type"] == "default" or not weight:
        return 1.0
    return yarn_mscale(number(parameters, "factor"), weight) ** 2


def _translate(name: str, tensor: torch.Tensor, num_layers: int) -> Iterator[tuple[str, torch.Tensor]]:
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if layer is None or int(layer[1]) < num_layers:  # behind the last layer stand those that draft further tokens
        yield from split_experts(name, tensor)
