"""Drafts by the model's own first layers, the last norm and the head (Elhoushi et al., 2024, "LayerSkip", arXiv
2404.16710; Zhang et al., 2023, "Draft & Verify", arXiv 2309.08168). It needs no other weights and no other cache."""

from collections import Counter

import numpy as np
import torch
from msgspec.structs import replace

from sojourn.engine.compute.attention.backend import AttentionBackend
from sojourn.engine.compute.buffers import to_device
from sojourn.engine.compute.kv_cache import KVCache
from sojourn.engine.compute.logits import argmax
from sojourn.engine.compute.operations.backend import Operations
from sojourn.engine.techniques.speculation.proposers.draft_inputs import DraftTables
from sojourn.engine.techniques.speculation.proposers.greedy_chain import greedy_chain
from sojourn.engine.techniques.speculation.proposers.head_files import read_bytes
from sojourn.engine.techniques.speculation.proposers.pass_costs import PassCosts
from sojourn.engine.techniques.speculation.proposers.proposer import ComputedStep, Proposal
from sojourn.engine.token.models.decoder import Decoder
from sojourn.engine.token.models.moe import MixtureOfExperts
from sojourn.engine.token.models.taps import Taps
from sojourn.metrics.compute.cost_model import ModelShape
from sojourn.metrics.errors import ModelError


class EarlyExitProposer:
    """Writes the keys and values of the first `depth` layers to the slots that the verification writes again. It uses
    the target's kernels: the results of the step that they hold are read by then."""

    reads_hidden = False
    reads_layers: tuple[int, ...] = ()

    def __init__(
        self,
        model: Decoder,
        depth: int | None,
        kv_cache: KVCache,
        block_size: int,
        attention: AttentionBackend,
        operations: Operations,
    ):
        """`depth` None: a quarter of the layers. Raises ModelError where the model has no layer behind them."""
        layers = len(model.layers)
        depth = max(1, layers // 4) if depth is None else depth
        if depth >= layers:
            raise ModelError(
                f"speculation_layers={depth} leaves no layer to verify with, for the model has {layers}; lower it"
            )
        self.depth = depth
        self.shape = _first_layers(model, depth, kv_cache.values.dtype)
        self._model, self._kv_cache, self._block_size = model, kv_cache, block_size
        self._attention, self._operations = attention, operations
        self._device = kv_cache.values.device

    def forget(self, request_id: str) -> None:
        """Nothing is remembered of a request."""

    @torch.inference_mode()
    def propose(self, step: ComputedStep) -> Proposal:
        sequences = [sequence for sequence in step.sequences if sequence.wanted]
        wanted = np.array([sequence.wanted for sequence in sequences])
        begins = np.array([sequence.num_known - 1 for sequence in sequences])
        blocks = [sequence.request.blocks for sequence in sequences]
        tables = DraftTables(blocks, (begins + wanted).tolist(), self._block_size, self._device)
        ids = to_device(torch.tensor([sequence.sampled[-1] for sequence in sequences]), self._device)
        costs = PassCosts(self.shape)

        def following(ids: torch.Tensor, active: np.ndarray, kept: torch.Tensor | None, depth: int) -> torch.Tensor:
            past = begins[active] + depth
            costs.add(np.ones_like(past), past, len(past))
            return self._next(ids, *tables.inputs(past, np.ones_like(past), active))

        first = following(ids, np.arange(len(sequences)), None, 0)
        found = greedy_chain(first, wanted, following)
        drafts = {each.request.id: chosen for each, chosen in zip(sequences, found, strict=True)}
        return Proposal(drafts, *costs.total())

    def _next(self, ids: torch.Tensor, positions: torch.Tensor, inputs) -> torch.Tensor:
        """The tokens that the first layers find most probable [num_sequences]."""
        self._attention.begin(inputs)
        kernels = self._operations, self._attention, self._kv_cache
        hidden = self._model(ids, positions, inputs.slots, *kernels, Taps(depth=self.depth))
        return argmax(self._model.logits(hidden))


def _first_layers(model: Decoder, depth: int, kv_dtype: torch.dtype) -> ModelShape:
    """Weights that the last layers read are left out, as are their keys and values."""
    whole, layers, others = model.shape(kv_dtype), model.layers[:depth], model.layers[depth:]
    experts = whole.experts
    if experts is not None:
        mixtures = sum(isinstance(layer.mlp, MixtureOfExperts) for layer in layers)
        experts = replace(experts, num_layers=mixtures) if mixtures else None
    return replace(
        whole,
        weight_bytes=whole.weight_bytes - sum(read_bytes(layer) for layer in others),
        kv_bytes_per_token=whole.kv_bytes_per_token * depth // len(model.layers),
        experts=experts,
        attention_parameters=sum(layer.attention.active_parameters for layer in layers),
        mlp_parameters=sum(layer.mlp.active_parameters for layer in layers),
        windows=tuple(Counter(model.config.windows[:depth]).items()),
    )
