"""EAGLE-3 (Li et al., 2025): a Llama layer on three hidden states of the target and the embedding of the next token.

Checkpoints come in two layouts: that of the authors, flat, with a `midlayer`, and that of the library speculators, with
`transformer_layer_config` and `layers.0`. A state that is named i is the residual stream that enters layer i.
"""

import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from sojourn.engine.compute.kv_cache import KVCache, bytes_per_token
from sojourn.engine.compute.linear import Linear
from sojourn.engine.compute.logits import argmax
from sojourn.engine.compute.operations.backend import Operations, Rope, Step
from sojourn.engine.compute.operations.reference import rms_norm
from sojourn.engine.techniques.speculation.proposers.head_files import HeadFiles
from sojourn.engine.techniques.speculation.proposers.proposer import ComputedStep
from sojourn.engine.token.models.decoder import Decoder
from sojourn.engine.token.models.grouped import GroupedAttention, GroupedConfig
from sojourn.engine.token.models.mlp import GatedMLP
from sojourn.engine.token.models.rope import refuse_odd, rope_parameters, rope_table
from sojourn.engine.token.models.settings import count, listed, number, refuse_unless, section
from sojourn.metrics.compute.cost_model import ModelShape
from sojourn.metrics.errors import ModelError

NUM_STATES = 3
LEFT_OUT = ("t2d",)  # the inverse of d2t
_ID_KEYS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")


class Eagle3Layer(nn.Module):
    """`draft_vocab_size` None: the head is the target's."""

    reads_hidden = False

    def __init__(
        self,
        target: Decoder,
        config: dict[str, Any],
        state_ids: tuple[int, ...],
        *,
        norm_before_residual: bool,
        draft_vocab_size: int | None,
        own_embedding: bool,
        has_map: bool,
    ):
        super().__init__()
        size = count(config, "hidden_size")
        self.eps, self.norm_before_residual = number(config, "rms_norm_eps"), norm_before_residual
        self.reads_layers = tuple(index - 1 for index in state_ids)
        self._config, self._target = config, [target]  # in a list: its weights are not ours
        self._size = size
        self.fc = Linear(NUM_STATES * target.config.hidden_size, size)
        self.attention = GroupedAttention(_attention(config, size), None)
        self.mlp = GatedMLP(size, count(config, "intermediate_size"), bias=bool(config.get("mlp_bias")))
        for name in ("input_norm", "hidden_norm", "post_norm", "norm"):
            self.register_parameter(name, nn.Parameter(torch.empty(size)))
        self.head = None if draft_vocab_size is None else Linear(size, draft_vocab_size)
        vocab_size = target.config.vocab_size
        self.embedding = nn.Parameter(torch.empty(vocab_size, size)) if own_embedding else None
        self.register_buffer("d2t", torch.empty(draft_vocab_size, dtype=torch.int64) if has_map else None)
        self.kv_layout = self.attention.kv_layout
        self._angles: tuple[torch.Tensor, torch.Tensor] | None = None

    def refuse_strange_ids(self) -> None:
        """Raises ModelError where a draft would be no token of the target: its embedding is looked up."""
        if self.d2t is not None:
            ids = torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t
            if ids.min() < 0 or ids.max() >= self._target[0].config.vocab_size:
                raise ModelError("d2t of the EAGLE-3 layer names tokens that the model does not have; it is damaged")

    def make_rope(self, max_len: int) -> None:
        cos, sin = rope_table(self._config, self.attention.rotary_dim, max_len)
        self._angles = tuple(t.to(self.norm.device, self.norm.dtype)[:, None, :] for t in (cos, sin))

    def rope(self, positions: torch.Tensor) -> Rope:
        return Rope(*self._angles, positions)

    def states(self, step: ComputedStep, rows: torch.Tensor | None) -> torch.Tensor:
        outputs = step.layer_outputs
        return self.fc(torch.cat([output if rows is None else output[rows] for output in outputs], dim=-1))

    def compute(self, ids: torch.Tensor, states: torch.Tensor, step: Step, kv_cache: KVCache) -> torch.Tensor:
        target, operations = self._target[0], step.operations
        table = target.embedding if self.embedding is None else self.embedding
        embedded = F.embedding(ids, table).to(states.dtype)
        both = torch.empty(len(ids), 2 * self._size, dtype=states.dtype, device=states.device)
        both[:, : self._size] = operations.norm(rms_norm, embedded, self.input_norm, self.eps)
        both[:, self._size :] = operations.norm(rms_norm, states, self.hidden_norm, self.eps)
        residual = both[:, self._size :].contiguous() if self.norm_before_residual else states
        x = self.attention(both, step, kv_cache.layers()[0])
        normed, residual = operations.add_norm(rms_norm, x, residual, self.post_norm, self.eps)
        return residual + self.mlp(normed, operations)

    def drafts(self, stream: torch.Tensor, operations: Operations) -> torch.Tensor:
        normed = operations.norm(rms_norm, stream, self.norm, self.eps)
        ids = argmax((self.head or self._target[0].head)(normed))
        return ids if self.d2t is None else ids + self.d2t[ids]

    @property
    def state_flops(self) -> int:
        return 2 * self.fc.num_weights

    def shape(self, kv_dtype: torch.dtype) -> ModelShape:
        head = self.head or self._target[0].head
        linears = [module for module in self.modules() if isinstance(module, Linear)]
        packed = sum(module.packed_bytes for module in [*linears, *([] if self.head else [head])])
        own = [part for name, part in self.named_parameters() if name != "embedding"]
        return ModelShape(
            vocab_size=head.out_features,
            hidden_size=self._size,
            attention_parameters=self.attention.active_parameters,
            mlp_parameters=self.mlp.active_parameters,
            pair_flops=self.attention.pair_flops,
            windows=((None, 1),),
            kv_bytes_per_token=bytes_per_token(self.kv_layout, 1, kv_dtype),
            weight_bytes=packed + sum(part.nbytes for part in own),
        )

    def slices(self) -> dict[str, torch.Tensor]:
        layer = "layers.0"
        targets = {
            "fc.weight": self.fc.weight,
            "norm.weight": self.norm,
            f"{layer}.input_layernorm.weight": self.input_norm,
            f"{layer}.hidden_norm.weight": self.hidden_norm,
            f"{layer}.post_attention_layernorm.weight": self.post_norm,
        }
        targets |= self.attention.slices(f"{layer}.self_attn") | self.mlp.slices(f"{layer}.mlp")
        optional = {"lm_head.weight": None if self.head is None else self.head.weight,
                    "embed_tokens.weight": self.embedding, "d2t": self.d2t}  # fmt: skip
        return targets | {name: tensor for name, tensor in optional.items() if tensor is not None}


def outlined_layer(files: HeadFiles, target: Decoder) -> Eagle3Layer:
    """The layer of a folder, in the current device and dtype and not filled. Raises ModelError."""
    whole = files.config
    config = section(whole, "transformer_layer_config") or whole
    refuse_unless(config, hidden_act="silu", num_hidden_layers=1)
    names = {name for stored in files.names for name, _ in translate_layer(stored, files.outlines[stored])}
    size, vocab_size = count(config, "hidden_size"), target.config.vocab_size
    for what, found, expected in (
        ("vocab_size", config.get("vocab_size", vocab_size), vocab_size),
        ("target_hidden_size", whole.get("target_hidden_size") or target.config.hidden_size, target.config.hidden_size),
    ):
        if found != expected:
            raise ModelError(f"{files.folder} has {what}={found!r}, and the model {expected}; it drafts for another "
                             "model")  # fmt: skip
    own_embedding, own_head = "embed_tokens.weight" in names, "lm_head.weight" in names
    if size != target.config.hidden_size and not (own_embedding and own_head):
        raise ModelError(f"{files.folder} has hidden_size={size}, and the model {target.config.hidden_size}; it then "
                         "needs an embedding and a head of its own")  # fmt: skip
    draft_vocab_size = count(whole, "draft_vocab_size", vocab_size)
    if draft_vocab_size != vocab_size and "d2t" not in names:
        raise ModelError(f"{files.folder} drafts {draft_vocab_size} of {vocab_size} tokens, but lacks d2t, which says "
                         "which")  # fmt: skip
    return Eagle3Layer(
        target,
        config,
        _state_ids(whole, len(target.layers)),
        norm_before_residual=bool(whole.get("norm_before_residual", config is not whole)),
        draft_vocab_size=draft_vocab_size if own_head else None,
        own_embedding=own_embedding,
        has_map="d2t" in names and own_head,
    )


def translate_layer(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A stored tensor under the names of `Eagle3Layer.slices`."""
    if name not in LEFT_OUT and not name.endswith("rotary_emb.inv_freq"):
        yield re.sub(r"^(model\.)?(midlayer\.)?", lambda found: "layers.0." if found[2] else "", name), tensor


def _attention(config: dict[str, Any], size: int) -> GroupedConfig:
    heads = count(config, "num_attention_heads")
    kv_heads = count(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelError(f"config.json has {heads} attention heads, which {kv_heads} key and value heads do not divide")
    head_dim = count(config, "head_dim", size // heads)
    refuse_odd(head_dim)
    rope_parameters(config)  # refuses what is not supported
    bias, eps = bool(config.get("attention_bias")), number(config, "rms_norm_eps")
    return GroupedConfig(
        size, heads, kv_heads, head_dim, head_dim**-0.5, eps, qkv_bias=bias, output_bias=bias, input_size=2 * size
    )


def _state_ids(config: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """Which hidden states of the target the layer reads; by default those of the paper: a low, a middle, a high one."""
    ids = next((found for key in _ID_KEYS if (found := listed(config, key))), None)
    if ids is None:
        ids = [2, num_layers // 2, num_layers - 3]
    whole = all(isinstance(index, int) and 0 <= index <= num_layers for index in ids)
    if len(ids) != NUM_STATES or not whole or sorted(set(ids)) != ids:
        raise ModelError(
            f"config.json has {_ID_KEYS[0]}={ids!r}; an EAGLE-3 layer for a model of {num_layers} layers reads three "
            f"different states, in ascending order, from 0 to {num_layers}"
        )
    return tuple(ids)
