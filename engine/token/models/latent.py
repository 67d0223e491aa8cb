"""Multi-head latent attention (DeepSeek-V2, 2024): the cache holds one latent and one rotated key a token, for all
heads.

A head's keys and values are linear in the latent, so their matrices are moved to the query and to the result
(absorbed), and what is left is multi-query attention over the latent. Decodes are cheapest so. For a chunk of a prompt
it may be cheaper to compute the keys and values of its whole context from the latents (expanded): see expansion.py. A
step may have both.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from sojourn.engine.compute.attention.backend import AttentionBackend, AttentionSpec
from sojourn.engine.compute.communication.layout import ONE_PROCESS, ParallelLayout
from sojourn.engine.compute.cuts import Cut, Cuts
from sojourn.engine.compute.kv_cache import KVLayout, LayerCache
from sojourn.engine.compute.linear import Linear, LinearPart
from sojourn.engine.compute.operations.backend import Step
from sojourn.engine.compute.operations.reference import pairs_to_halves, rms_norm, rotate
from sojourn.engine.token.models.expansion import ROOM_BYTES, Expander, Part, gathered, place
from sojourn.metrics.compute.cost_model import Expansion

LATENT_NORM_EPS = 1e-6  # of the two inner norms; config.json's rms_norm_eps is not theirs


@dataclass(frozen=True, slots=True)
class LatentConfig:
    hidden_size: int
    num_heads: int
    query_rank: int | None  # None: queries are projected in one piece
    latent_dim: int
    nope_dim: int  # of a head's query and key, without position
    rope_dim: int
    value_dim: int
    scale: float
    bias: bool
    interleaved: bool  # the checkpoint pairs neighbouring dimensions in its rotation


class LatentAttention(nn.Module):
    """The layers of a model share an `expander`. A rank of `layout` holds some of the heads, and all latents: its
    output is then a part of a sum over ranks."""

    def __init__(
        self, config: LatentConfig, expander: Expander, window: int | None, layout: ParallelLayout = ONE_PROCESS
    ):
        super().__init__()
        self.is_partial = layout.tensor_parallel > 1
        self._heads_of = layout.tensor_part(config.num_heads, "attention heads"), config.num_heads
        self._adds_bias = layout.tensor_rank == 0
        config = replace(config, num_heads=len(self._heads_of[0]))
        self.config, self.expander = config, expander
        self.spec = AttentionSpec(config.scale, config.latent_dim, window)
        self.expanded_spec = AttentionSpec(config.scale, config.value_dim)
        self.kv_layout = KVLayout(1, 1, config.latent_dim + config.rope_dim)
        self.rotary_dim = config.rope_dim
        self.pair_flops = 2 * config.num_heads * (2 * config.latent_dim + config.rope_dim)
        query_size = config.num_heads * (config.nope_dim + config.rope_dim)
        self.sizes = [config.query_rank or query_size, config.latent_dim, config.rope_dim]
        self.down = Linear(config.hidden_size, sum(self.sizes), bias=config.bias)
        self.latent_norm = nn.Parameter(torch.empty(config.latent_dim))
        if config.query_rank is not None:
            self.query_norm = nn.Parameter(torch.empty(config.query_rank))
            self.query_up = Linear(config.query_rank, query_size)
        self.up = nn.Parameter(torch.empty(config.num_heads, config.nope_dim + config.value_dim, config.latent_dim))
        self.o = Linear(config.num_heads * config.value_dim, config.hidden_size, bias=config.bias)

    def narrow(self, window: int, sink_tokens: int) -> None:
        """Lays a window over the attention, beside which the first tokens are seen."""
        self.spec = replace(self.spec, window=window, sink_tokens=sink_tokens)

    @property
    def active_parameters(self) -> int:
        query_up = self.query_up.num_weights if self.config.query_rank is not None else 0
        return self.down.num_weights + query_up + self.up.numel() + self.o.num_weights

    def forward(self, x: torch.Tensor, step: Step, layer_cache: LayerCache) -> torch.Tensor:
        config = self.config
        query, latent, key_rope = self.down(x).split(self.sizes, dim=-1)
        if config.query_rank is not None:
            query = self.query_up(rms_norm(query, self.query_norm, LATENT_NORM_EPS))
        query = query.unflatten(-1, (config.num_heads, -1))
        query_nope, query_rope = query.split((config.nope_dim, config.rope_dim), dim=-1)
        key_rope = key_rope[:, None]
        if config.interleaved:  # the order of dimensions is free as long as queries and keys share it
            query_rope, key_rope = pairs_to_halves(query_rope), pairs_to_halves(key_rope)
        latent = rms_norm(latent, self.latent_norm, LATENT_NORM_EPS)[:, None]
        rope = step.rope.rows()
        query_rope, key_rope = rotate(query_rope, *rope), rotate(key_rope, *rope)
        step.operations.write(torch.cat((latent, key_rope), dim=-1), None, step.slots, layer_cache)
        parts = self.expander.parts(step.attention, self.expansion(x.dtype))
        if parts is None:
            return self.o(self._absorbed(step.attention, query_nope, query_rope, layer_cache).flatten(1))
        values = x.new_empty(len(x), config.num_heads, config.value_dim)
        for part in parts:
            attend = self._expanded if part.expanded else self._absorbed
            of = part if part.expanded else part.attention
            values[part.rows] = attend(of, query_nope[part.rows], query_rope[part.rows], layer_cache)
        return self.o(values.flatten(1))

    def parts(self, prefix: str) -> dict[str, LinearPart]:
        """The checkpoint's linear modules by name, but for `kv_b_proj`: its matrix is a factor of attention here."""
        query, rest = self.sizes[0], self.sizes[1] + self.sizes[2]
        first = "q_proj" if self.config.query_rank is None else "q_a_proj"
        found = {
            f"{prefix}.{first}": LinearPart(self.down, 0, query),
            f"{prefix}.kv_a_proj_with_mqa": LinearPart(self.down, query, rest),
            f"{prefix}.o_proj": LinearPart(self.o, 0, self.o.out_features),
        }
        if self.config.query_rank is not None:
            found[f"{prefix}.q_b_proj"] = LinearPart(self.query_up, 0, self.query_up.out_features)
        cuts = self.cuts(prefix)
        return {name: part._replace(cut=cuts.get(f"{name}.weight")) for name, part in found.items()}

    def cuts(self, prefix: str) -> Cuts:
        """What this rank holds of the checkpoint's tensors; whole are those that are not named."""
        if not self.is_partial:
            return {}
        config, queries = self.config, "q_proj" if self.config.query_rank is None else "q_b_proj"
        return {
            f"{prefix}.{queries}.weight": Cut.of_units(0, *self._heads_of, config.nope_dim + config.rope_dim),
            f"{prefix}.kv_b_proj.weight": Cut.of_units(0, *self._heads_of, config.nope_dim + config.value_dim),
            f"{prefix}.o_proj.weight": Cut.of_units(1, *self._heads_of, config.value_dim),
            f"{prefix}.o_proj.bias": Cut.added_once(config.hidden_size, here=self._adds_bias),
        }

    def _absorbed(
        self, attention: AttentionBackend, query_nope: torch.Tensor, query_rope: torch.Tensor, layer_cache: LayerCache
    ) -> torch.Tensor:
        """Queries [num_tokens, heads, nope_dim] and [num_tokens, heads, rope_dim] → [num_tokens, heads, value_dim]."""
        key_up, value_up = self._factors()
        absorbed = torch.bmm(query_nope.transpose(0, 1), key_up).transpose(0, 1)
        mixed = attention.attend(torch.cat((absorbed, query_rope), dim=-1), layer_cache, self.spec)
        return torch.bmm(mixed.transpose(0, 1), value_up.transpose(1, 2)).transpose(0, 1)

    def _expanded(
        self, part: Part, query_nope: torch.Tensor, query_rope: torch.Tensor, layer_cache: LayerCache
    ) -> torch.Tensor:
        """The same of sequences whose latents are read back from the cache, as other steps will read them."""
        config = self.config
        room = self.expander.room(part.num_blocks, config.num_heads, query_nope)
        keys, values = room.values
        nope, rope, value = slice(config.nope_dim), slice(config.nope_dim, None), slice(config.value_dim)
        for blocks, context, first in part.expanded:
            vectors = gathered(layer_cache, blocks, context, query_nope.dtype)
            latent, key_rope = vectors.split((config.latent_dim, config.rope_dim), dim=-1)
            both = F.linear(latent, self.up.flatten(0, 1)).unflatten(-1, (config.num_heads, -1)).transpose(0, 1)
            place(keys, first, nope, both[..., : config.nope_dim])
            place(keys, first, rope, key_rope.expand(config.num_heads, -1, -1))
            place(values, first, value, both[..., config.nope_dim :])
        return part.attention.attend(torch.cat((query_nope, query_rope), dim=-1), room, self.expanded_spec)

    def _factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of keys [heads, nope_dim, latent_dim] and values [heads, value_dim, latent_dim]."""
        return self.up.split((self.config.nope_dim, self.config.value_dim), dim=1)

    def expansion(self, dtype: torch.dtype) -> Expansion | None:
        """What expanding costs in activations of this dtype; None where values would not fit beside keys."""
        config = self.config
        head_dim, expanded = config.nope_dim + config.rope_dim, config.nope_dim + config.value_dim
        if config.value_dim > head_dim or self.spec.window is not None:
            return None
        return Expansion(
            saved_pair_flops=2 * config.num_heads * (2 * config.latent_dim - expanded),
            position_flops=2 * config.num_heads * expanded * config.latent_dim,
            most_context=ROOM_BYTES // (2 * config.num_heads * head_dim * dtype.itemsize),
        )

    def slices(self, prefix: str) -> dict[str, torch.Tensor]:
        query_rank, query = self.config.query_rank, self.sizes[0]
        first = "q_proj" if query_rank is None else "q_a_proj"
        targets = {
            f"{prefix}.{first}.weight": self.down.weight[:query],
            f"{prefix}.kv_a_proj_with_mqa.weight": self.down.weight[query:],
            f"{prefix}.kv_a_layernorm.weight": self.latent_norm,
            f"{prefix}.kv_b_proj.weight": self.up.flatten(0, 1),
            f"{prefix}.o_proj.weight": self.o.weight,
        }
        if query_rank is not None:
            targets |= {
                f"{prefix}.q_a_layernorm.weight": self.query_norm,
                f"{prefix}.q_b_proj.weight": self.query_up.weight,
            }
        if self.down.bias is not None:
            if query_rank is not None:
                targets[f"{prefix}.q_a_proj.bias"] = self.down.bias[:query]
            targets[f"{prefix}.kv_a_proj_with_mqa.bias"] = self.down.bias[query:]
            targets[f"{prefix}.o_proj.bias"] = self.o.bias
        return targets
