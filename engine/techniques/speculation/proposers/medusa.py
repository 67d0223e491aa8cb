"""Drafts by heads on the target's last hidden state (Medusa: Cai et al., 2024), as one chain without a tree.

Head i, behind the state of the last computed token, predicts the token i + 2 positions further: the next one is
sampled already. The heads see neither that token nor each other's choices.
"""

import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from sojourn.engine.compute.linear import Linear
from sojourn.engine.compute.logits import argmax
from sojourn.engine.techniques.speculation.proposers.head_files import HeadFiles, read_bytes
from sojourn.engine.techniques.speculation.proposers.proposer import ComputedStep, Proposal
from sojourn.engine.token.models.decoder import Decoder
from sojourn.engine.token.models.settings import count
from sojourn.metrics.errors import ModelError

_HEAD = {"lm_heads.0.weight", "lm_head.weight"}  # either may be the one head of all blocks
_ORIGINAL = re.compile(r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.(?:linear\.)?(weight|bias)")


class MedusaHeads(nn.Module):
    """hidden states [rows, hidden_size] → drafts [rows, num_heads].

    `own_heads` is their number, or 1 where all blocks share one, or 0 where they share the target's. `token_map`
    [num_tokens] names the tokens of heads that know only so many.
    """

    def __init__(
        self, target: Decoder, num_heads: int, num_layers: int, *, bias: bool, own_heads: int, num_tokens: int | None
    ):
        super().__init__()
        hidden_size, vocab_size = target.config.hidden_size, target.config.vocab_size
        self.blocks = nn.ModuleList(
            nn.ModuleList(Linear(hidden_size, hidden_size, bias=bias) for _ in range(num_layers))
            for _ in range(num_heads)
        )
        rows = num_tokens or vocab_size
        self.heads = nn.ModuleList(Linear(hidden_size, rows) for _ in range(own_heads))
        self._target = [target]  # in a list: its weights are not ours
        self.register_buffer("token_map", None if num_tokens is None else torch.empty(num_tokens, dtype=torch.int64))

    def forward(self, hidden: torch.Tensor, num_drafts: int) -> torch.Tensor:
        drafts = []
        for index, block in enumerate(self.blocks[:num_drafts]):
            state = hidden
            for layer in block:
                state = state + F.silu(layer(state))
            drafts.append(argmax(self._head(index)(state)))
        drafts = torch.stack(drafts, dim=-1)
        return drafts if self.token_map is None else self.token_map[drafts]

    @property
    def flops_per_draft(self) -> int:
        return 2 * (sum(layer.num_weights for layer in self.blocks[0]) + self._head(0).num_weights)

    @property
    def bytes_per_draft(self) -> int:
        """Of weights, for all sequences."""
        return read_bytes(self.blocks[0]) + read_bytes(self._head(0))

    def _head(self, index: int) -> Linear:
        return self.heads[index % len(self.heads)] if len(self.heads) else self._target[0].head

    def slices(self) -> dict[str, torch.Tensor]:
        targets = {f"lm_heads.{index}.weight": head.weight for index, head in enumerate(self.heads)}
        for index, block in enumerate(self.blocks):
            for place, layer in enumerate(block):
                targets[f"blocks.{index}.layers.{place}.weight"] = layer.weight
                if layer.bias is not None:
                    targets[f"blocks.{index}.layers.{place}.bias"] = layer.bias
        return targets if self.token_map is None else targets | {"token_map": self.token_map}


def outlined_heads(files: HeadFiles, target: Decoder) -> MedusaHeads:
    """The heads of a folder, in the current device and dtype and not filled: the layout of vLLM, or the original one
    of FasterDecoding. Raises ModelError."""
    config = files.config
    num_heads, num_layers = _sizes(config, files)
    for key, expected in (("hidden_size", target.config.hidden_size), ("vocab_size", target.config.vocab_size)):
        if config.get(key) is not None and config[key] != expected:
            raise ModelError(f"{files.folder} has {key}={config[key]!r}, and the model {expected}; its heads are of "
                             "another model")  # fmt: skip
    names = {vllm_name(stored, num_layers) for stored in files.names}
    truncated = config.get("truncated_vocab_size")
    has_map = "token_map" in names and truncated is not None and truncated < target.config.vocab_size
    return MedusaHeads(
        target,
        num_heads,
        num_layers,
        bias="blocks.0.layers.0.bias" in names,
        own_heads=(1 if config.get("original_lm_head") else num_heads) if _HEAD & names else 0,
        num_tokens=count(config, "truncated_vocab_size") if has_map else None,
    )


def translate_heads(heads: MedusaHeads, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A stored tensor under the names of `MedusaHeads.slices`."""
    ours, rows = vllm_name(name, len(heads.blocks[0])), heads.token_map
    if ours == "token_map" and rows is None:
        return
    if len(heads.heads) < len(heads.blocks) and ours.startswith("lm_head"):  # one for all blocks, or the target's
        if ours not in _HEAD or not len(heads.heads):
            return
        ours = "lm_heads.0.weight"
    yield ours, tensor


def vllm_name(name: str, num_layers: int) -> str:
    """vLLM's name of a tensor, which may have the original one: head, place in it, and kind."""
    if (original := _ORIGINAL.fullmatch(name)) is None:
        return name.removeprefix("medusa_heads.")
    index, place, kind = int(original[1]), int(original[2]), original[3]
    return f"lm_heads.{index}.{kind}" if place == num_layers else f"blocks.{index}.layers.{place}.{kind}"


def _sizes(config: dict[str, Any], files: HeadFiles) -> tuple[int, int]:
    """Heads, and layers of each, by either name."""
    found = []
    for names in (("num_heads", "medusa_num_heads"), ("num_hidden_layers", "medusa_num_layers", "num_layers")):
        name = next((name for name in names if config.get(name) is not None), None)
        if name is None:
            raise ModelError(f"{files.folder / 'config.json'} lacks {names[0]}, so it is not of Medusa heads")
        found.append(count(config, name))
    return found[0], found[1]


class MedusaProposer:
    reads_hidden = True
    reads_layers: tuple[int, ...] = ()

    def __init__(self, heads: MedusaHeads):
        self._heads = heads

    def forget(self, request_id: str) -> None:
        """The heads remember nothing."""

    @torch.inference_mode()
    def propose(self, step: ComputedStep) -> Proposal:
        drafting = [sequence for sequence in step.sequences if sequence.wanted and sequence.sampled]
        if not drafting:
            return Proposal({})
        rows = [s.first_row + s.num_computed - 1 - s.past_tokens for s in drafting]  # of the last accepted token
        most = min(max(sequence.wanted for sequence in drafting), len(self._heads.blocks))
        drafts = self._heads(step.hidden[torch.tensor(rows, device=step.hidden.device)], most).tolist()
        found = {s.request.id: row[: s.wanted] for s, row in zip(drafting, drafts, strict=True)}
        flops = len(drafting) * most * self._heads.flops_per_draft
        return Proposal(found, flops, most * self._heads.bytes_per_draft)
