"""The drafters that train_drafts.py trains, with the names of their public layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

if TYPE_CHECKING:
    from train_drafts import Taught

CHAIN = 4  # drafted tokens that training looks at


class Drafter(nn.Module):
    """Called with windows of ids [windows, length], it gives the logits [windows, rows, vocab_size] of each position of
    a chain. Row r of position p predicts token r + distance + p, as if all tokens before that were accepted."""

    distance: int

    def forward(self, ids: torch.Tensor, taught: Taught) -> list[torch.Tensor]:
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        """config.json."""
        raise NotImplementedError

    def tensors(self) -> dict[str, torch.Tensor]:
        """Those of the checkpoint. What the tiny model has already is left out."""
        return {name: tensor for name, tensor in self.state_dict().items() if not name.startswith("_")}


class DraftModel(Drafter):
    """A smaller model of the same shape. Each position of its chain is one more call, so training needs only one."""

    distance = 1

    def __init__(self, target: Qwen3ForCausalLM) -> None:
        super().__init__()
        shape = target.config.to_dict() | dict(
            hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1,
            head_dim=32, layer_types=["full_attention"] * 2, dtype="float32",
        )  # fmt: skip
        self.model = Qwen3ForCausalLM(Qwen3Config(**shape))

    def forward(self, ids: torch.Tensor, taught: Taught) -> list[torch.Tensor]:
        logits = self.model(input_ids=ids, use_cache=False).logits
        chain = 1 if self.training else CHAIN
        return [logits[:, position : ids.shape[1] - 1] for position in range(chain)]

    def config(self) -> dict[str, Any]:
        named = self.model.config.to_diff_dict() | {"architectures": ["Qwen3ForCausalLM"], "dtype": "float16"}
        return {key: value for key, value in named.items() if key != "_name_or_path"}

    def tensors(self) -> dict[str, torch.Tensor]:
        tensors = self.model.state_dict()
        return {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}


class Medusa(Drafter):
    """Heads on the last hidden state (Cai et al., 2024), each a residual block before the tiny model's own head."""

    distance = 2

    def __init__(self, target: Qwen3ForCausalLM) -> None:
        super().__init__()
        size = target.config.hidden_size
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(size, size)])}) for _ in range(CHAIN)
        )
        for block in self.blocks:
            nn.init.zeros_(block["layers"][0].weight)
            nn.init.zeros_(block["layers"][0].bias)
        self._head = [target.lm_head.weight]  # in a list: no parameter of ours

    def forward(self, ids: torch.Tensor, taught: Taught) -> list[torch.Tensor]:
        found = []
        for position, block in enumerate(self.blocks):
            hidden = taught.hidden[:, : ids.shape[1] - self.distance - position]
            for layer in block["layers"]:
                hidden = hidden + F.silu(layer(hidden))
            found.append(F.linear(hidden, self._head[0]))
        return found

    def config(self) -> dict[str, Any]:
        vocab_size, hidden_size = self._head[0].shape
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": hidden_size,
            "vocab_size": vocab_size,
            "num_heads": CHAIN,
            "num_hidden_layers": 1,
            "medusa_fc_bias": True,
            "original_lm_head": True,
        }


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=0.02)
    return layer


class Eagle3(Drafter):
    """One layer on three hidden states and the next token's embedding (EAGLE-3: Li et al., 2025).

    Training unrolls the chain ("training-time test"): from its second position on, the layer reads its own output in
    place of the tiny model's hidden states.
    """

    distance = 2
    heads, kv_heads, head_dim, intermediate_size = 4, 1, 64, 192

    def __init__(self, target: Qwen3ForCausalLM) -> None:
        super().__init__()
        self._target = [target]
        size, eps = target.config.hidden_size, target.config.rms_norm_eps
        self.stream_ids = [1, 2, target.config.num_hidden_layers]
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = {"q_proj": linear(2 * size, queries), "k_proj": linear(2 * size, keys),
                     "v_proj": linear(2 * size, keys), "o_proj": linear(queries, size)}  # fmt: skip
        mlp = {"gate_proj": linear(size, self.intermediate_size), "up_proj": linear(size, self.intermediate_size),
               "down_proj": linear(self.intermediate_size, size)}  # fmt: skip
        norms = {name: RMSNorm(size, eps) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
        self.fc = linear(3 * size, size)
        self.layers = nn.ModuleList([
            nn.ModuleDict({"self_attn": nn.ModuleDict(attention), "mlp": nn.ModuleDict(mlp), **norms})
        ])  # fmt: skip
        self.norm = RMSNorm(size, eps)
        self.norm.weight.data.copy_(target.model.norm.weight)

    def forward(self, ids: torch.Tensor, taught: Taught) -> list[torch.Tensor]:
        target, length = self._target[0], ids.shape[1]
        stream = self.fc(torch.cat([taught.streams[index] for index in self.stream_ids], dim=-1))[:, : length - 1]
        keys, values, found = [], [], []
        for position in range(CHAIN):
            rows = length - self.distance - position + 1  # whose next token is known
            tokens = ids[:, 1 + position : 1 + position + rows]
            embedded = F.embedding(tokens, target.model.embed_tokens.weight)
            stream = self._layer(embedded, stream[:, :rows], position, keys, values)
            found.append(F.linear(self.norm(stream[:, : rows - 1]), target.lm_head.weight))
        return found

    def _layer(
        self, embedded: torch.Tensor, stream: torch.Tensor, position: int, keys: list, values: list
    ) -> torch.Tensor:
        """The residual stream behind the layer. `keys` and `values` gather those of each position of the chain."""
        layer = self.layers[0]
        both = torch.cat((layer["input_layernorm"](embedded), layer["hidden_norm"](stream)), dim=-1)
        parts = layer["self_attn"]
        places = torch.arange(both.shape[1]) + position
        query, key = (self._rotated(parts[name](both), places) for name in ("q_proj", "k_proj"))
        keys.append(key)
        values.append(parts["v_proj"](both).unflatten(-1, (-1, self.head_dim)).transpose(1, 2))
        stream = stream + parts["o_proj"](self._attended(query, keys, values))
        normed, mlp = layer["post_attention_layernorm"](stream), layer["mlp"]
        return stream + mlp["down_proj"](F.silu(mlp["gate_proj"](normed)) * mlp["up_proj"](normed))

    def _attended(self, query: torch.Tensor, keys: list, values: list) -> torch.Tensor:
        """A row sees the rows of the first position up to its own, and its own of each later position."""
        rows = query.shape[2]
        first = query @ keys[0][:, :, :rows].transpose(-1, -2)
        hidden = torch.ones(rows, rows, dtype=torch.bool).triu(1)
        scores = [first.masked_fill(hidden, float("-inf"))]
        scores += [(query * key[:, :, :rows]).sum(-1, keepdim=True) for key in keys[1:]]
        weights = (torch.cat(scores, dim=-1) * self.head_dim**-0.5).softmax(-1)
        mixed = weights[..., :rows] @ values[0][:, :, :rows]
        for index, value in enumerate(values[1:]):
            mixed = mixed + weights[..., rows + index, None] * value[:, :, :rows]
        return mixed.transpose(1, 2).flatten(2)

    def _rotated(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """[windows, rows, heads * head_dim] → [windows, heads, rows, head_dim]."""
        heads = x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        theta = self._target[0].config.rope_parameters["rope_theta"]
        frequencies = 1.0 / theta ** (torch.arange(0, self.head_dim, 2).float() / self.head_dim)
        angles = places[:, None].float() * frequencies
        cos, sin = (torch.cat((part, part), dim=-1) for part in (angles.cos(), angles.sin()))
        left, right = heads.chunk(2, dim=-1)
        return heads * cos + torch.cat((-right, left), dim=-1) * sin

    def config(self) -> dict[str, Any]:
        target = self._target[0].config
        layer = {
            "model_type": "llama", "hidden_size": target.hidden_size, "intermediate_size": self.intermediate_size,
            "num_hidden_layers": 1, "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
            "rms_norm_eps": target.rms_norm_eps, "vocab_size": target.vocab_size,
            "max_position_embeddings": target.max_position_embeddings, "rope_parameters": target.rope_parameters,
        }  # fmt: skip
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": target.vocab_size,
            "norm_before_residual": False,
            "eagle_aux_hidden_state_layer_ids": self.stream_ids,
            "speculators_config": {"algorithm": "eagle3", "verifier": {"architectures": target.architectures}},
            "transformer_layer_config": layer,
        }


DRAFTS: dict[str, Callable[[Qwen3ForCausalLM], Drafter]] = {"draft": DraftModel, "medusa": Medusa, "eagle3": Eagle3}
