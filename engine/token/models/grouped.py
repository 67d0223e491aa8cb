"""Attention with grouped queries: multi-head and multi-query attention are its two ends (Ainslie et al., 2023)."""

from dataclasses import dataclass, replace

import torch
from torch import nn

from sojourn.engine.compute.attention.backend import AttentionSpec
from sojourn.engine.compute.communication.layout import ONE_PROCESS, ParallelLayout
from sojourn.engine.compute.cuts import Cut, Cuts
from sojourn.engine.compute.kv_cache import KVLayout, LayerCache
from sojourn.engine.compute.linear import Linear, LinearPart
from sojourn.engine.compute.operations.backend import HeadSpec, Norm, Step
from sojourn.engine.compute.operations.reference import rms_norm
from sojourn.metrics.errors import ModelError


@dataclass(frozen=True, slots=True)
class GroupedConfig:
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    norm_eps: float
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    norm: Norm = rms_norm  # of heads
    soft_cap: float | None = None  # see AttentionSpec
    sinks: bool = False  # a sink logit a head
    clip: float | None = None  # bound of queries, keys and values
    alibi_slopes: tuple[float, ...] | None = None  # then there is no rotation
    input_size: int | None = None  # of what queries, keys and values are made of, if that is not hidden_size


def kv_heads_of(layout: ParallelLayout, num_kv_heads: int) -> range:
    """The key and value heads of a rank: several ranks hold the same one where there are fewer heads than ranks."""
    ranks = layout.tensor_parallel
    if ranks <= num_kv_heads:
        return layout.tensor_part(num_kv_heads, "key and value heads")
    if ranks % num_kv_heads:
        raise ModelError(
            f"tensor_parallel={ranks} is no multiple of the model's {num_kv_heads} key and value heads; use a size "
            "that divides them, or a multiple"
        )
    head = layout.tensor_rank * num_kv_heads // ranks
    return range(head, head + 1)


class GroupedAttention(nn.Module):
    """A rank of `layout` holds some of the heads: its output is then a part of a sum over ranks."""

    def __init__(self, config: GroupedConfig, window: int | None, layout: ParallelLayout = ONE_PROCESS):
        super().__init__()
        self.is_partial = layout.tensor_parallel > 1
        self._heads_of = (
            (layout.tensor_part(config.num_heads, "attention heads"), config.num_heads),
            (kv_heads_of(layout, config.num_kv_heads), config.num_kv_heads),
        )
        self._adds_bias = layout.tensor_rank == 0
        config = self.config = _of_heads(config, *(heads for heads, _ in self._heads_of))
        self.window = window
        self.kv_layout = KVLayout(2, config.num_kv_heads, config.head_dim)
        self.rotary_dim = config.head_dim
        self.pair_flops = 4 * config.num_heads * config.head_dim
        self.sizes = [n * config.head_dim for n in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
        self.qkv = Linear(config.input_size or config.hidden_size, sum(self.sizes), bias=config.qkv_bias)
        self.o = Linear(self.sizes[0], config.hidden_size, bias=config.output_bias)
        if config.qk_norm:
            self.q_norm = nn.Parameter(torch.empty(config.head_dim))
            self.k_norm = nn.Parameter(torch.empty(config.head_dim))
        if config.sinks:
            self.sinks = nn.Parameter(torch.empty(config.num_heads))
        self._heads: HeadSpec | None = None
        self._spec: AttentionSpec | None = None
        self._sink_tokens = 0

    @property
    def active_parameters(self) -> int:
        return self.qkv.num_weights + self.o.num_weights

    @property
    def heads(self) -> HeadSpec:
        if self._heads is None:  # not before the weights have their memory
            config = self.config
            norms = (self.q_norm, self.k_norm, config.norm) if config.qk_norm else ()
            self._heads = HeadSpec(config.num_heads, config.num_kv_heads, config.head_dim, config.norm_eps, *norms)
        return self._heads

    @property
    def spec(self) -> AttentionSpec:
        if self._spec is None:  # as above
            config, sinks = self.config, self.sinks if self.config.sinks else None
            self._spec = AttentionSpec(
                config.scale,
                config.head_dim,
                self.window,
                config.alibi_slopes,
                config.soft_cap,
                sinks,
                self._sink_tokens,
            )
        return self._spec

    def narrow(self, window: int, sink_tokens: int) -> None:
        """Lays a window over the attention, beside which the first tokens are seen."""
        self.window, self._sink_tokens, self._spec = window, sink_tokens, None

    def forward(self, x: torch.Tensor, step: Step, layer_cache: LayerCache) -> torch.Tensor:
        qkv = self.qkv(x)
        if self.config.clip is not None:
            qkv = qkv.clamp(-self.config.clip, self.config.clip)
        query = step.operations.write_heads(qkv, self.heads, step.rope, step.slots, layer_cache)
        return self.o(step.attention.attend(query, layer_cache, self.spec).flatten(1))

    def parts(self, prefix: str) -> dict[str, LinearPart]:
        """The checkpoint's linear modules by name."""
        begins, names = (0, self.sizes[0], self.sizes[0] + self.sizes[1]), ("q_proj", "k_proj", "v_proj")
        parts = zip(names, begins, self.sizes, strict=True)
        cuts = self.cuts(prefix)
        found = {f"{prefix}.{name}": LinearPart(self.qkv, begin, size) for name, begin, size in parts}
        found[f"{prefix}.o_proj"] = LinearPart(self.o, 0, self.o.out_features)
        return {name: part._replace(cut=cuts.get(f"{name}.weight")) for name, part in found.items()}

    def cuts(self, prefix: str) -> Cuts:
        """What this rank holds of the checkpoint's tensors; whole are those that are not named."""
        if not self.is_partial:
            return {}
        query, key = (Cut.of_units(0, heads, whole, self.config.head_dim) for heads, whole in self._heads_of)
        rows = {f"{prefix}.{name}_proj": cut for name, cut in (("q", query), ("k", key), ("v", key))}
        found: Cuts = {f"{name}.{kind}": cut for name, cut in rows.items() for kind in ("weight", "bias")}
        found[f"{prefix}.o_proj.weight"] = query.of_inputs()
        found[f"{prefix}.o_proj.bias"] = Cut.added_once(self.o.out_features, here=self._adds_bias)
        found[f"{prefix}.sinks"] = Cut.of_units(0, *self._heads_of[0], 1)
        return found

    def slices(self, prefix: str) -> dict[str, torch.Tensor]:
        targets = {f"{prefix}.o_proj.weight": self.o.weight}
        for name, part in zip("qkv", self.qkv.weight.split(self.sizes), strict=True):
            targets[f"{prefix}.{name}_proj.weight"] = part
        if self.qkv.bias is not None:
            for name, part in zip("qkv", self.qkv.bias.split(self.sizes), strict=True):
                targets[f"{prefix}.{name}_proj.bias"] = part
        if self.o.bias is not None:
            targets[f"{prefix}.o_proj.bias"] = self.o.bias
        if self.config.qk_norm:
            targets |= {f"{prefix}.q_norm.weight": self.q_norm, f"{prefix}.k_norm.weight": self.k_norm}
        if self.config.sinks:
            targets[f"{prefix}.sinks"] = self.sinks
        return targets


def _of_heads(config: GroupedConfig, query_heads: range, kv_heads: range) -> GroupedConfig:
    slopes = config.alibi_slopes
    return replace(
        config,
        num_heads=len(query_heads),
        num_kv_heads=len(kv_heads),
        alibi_slopes=None if slopes is None else slopes[query_heads.start : query_heads.stop],
    )
