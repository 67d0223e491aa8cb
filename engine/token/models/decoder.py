"""The decoder that all families share, and how a checkpoint fills it."""

from collections import Counter
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from sojourn.engine.compute.attention.backend import AttentionBackend
from sojourn.engine.compute.attention.cpp_backend import CppAttention
from sojourn.engine.compute.communication.communicator import Communicators
from sojourn.engine.compute.communication.layout import ONE_PROCESS, ParallelLayout
from sojourn.engine.compute.cpp.extension import library
from sojourn.engine.compute.cuts import Cut, Cuts
from sojourn.engine.compute.kv_cache import KVCache, KVLayout, bytes_per_token
from sojourn.engine.compute.layers_cpp import CppLayers, RopeTable
from sojourn.engine.compute.linear import Linear, LinearPart
from sojourn.engine.compute.operations.backend import Operations, Rope, Step
from sojourn.engine.compute.operations.cpp_backend import SHIFTS, CppOperations
from sojourn.engine.compute.quantisation.kernels import Kernels
from sojourn.engine.compute.quantisation.parts import storage_of
from sojourn.engine.compute.weight_formats import WeightFormat
from sojourn.engine.token.models.latent import LatentAttention
from sojourn.engine.token.models.layer import DecoderConfig, Layer
from sojourn.engine.token.models.moe import MixtureOfExperts
from sojourn.engine.token.models.rope import rope_table
from sojourn.engine.token.models.taps import Taps
from sojourn.engine.token.models.vocabulary import embedded, gathered_logits
from sojourn.metrics.compute.cost_model import Expansion, ExpertShape, ModelShape
from sojourn.metrics.errors import ModelError


class Decoder(nn.Module):
    """ids and positions, each [num_tokens] → hidden states [num_tokens, hidden_size]; `logits` for chosen rows.

    A rank of `layout` holds the layers of its stage, and its parts of their matrices. The first stage has the embedding
    and the head, which may be one, and the last has the last norm. `config` is of the stage, `whole_config` of all.
    """

    def __init__(self, config: DecoderConfig, layout: ParallelLayout = ONE_PROCESS):
        super().__init__()
        own = layout.stage_layers(len(config.mlps))
        self.layout, self.first_layer, self.num_all_layers = layout, own.start, len(config.mlps)
        self.whole_config = config
        config = self.config = replace(
            config, windows=config.windows[own.start : own.stop], mlps=config.mlps[own.start : own.stop]
        )
        self.tokens = layout.vocabulary(config.vocab_size)  # of which the rank holds the rows
        first, last = layout.is_first_stage, layout.is_last_stage
        vectors = (len(self.tokens), config.hidden_size)
        self.embedding = nn.Parameter(torch.empty(vectors)) if first else None
        self.layers = nn.ModuleList(
            Layer(config, config.attention(window, layout=layout), mlp(layout=layout))
            for window, mlp in zip(config.windows, config.mlps, strict=True)
        )
        self.norm = nn.Parameter(torch.empty(config.hidden_size)) if last else None
        self.head = Linear(*reversed(vectors)) if first else None
        self.tie()
        self.communicators = Communicators()
        self.sink_tokens = 0  # that all tokens see beside their window
        self.packed_format: str | None = None  # of the matrices that `pack` has packed
        self.checkpoint_format: str | None = None  # of a quantised checkpoint
        self._joined: tuple[tuple, CppLayers | None] = (None, None, None), None
        self.rope_tables: list[RopeTable] = []  # of the whole attention, and of windows if they have their own
        self._tables_of_layers = [
            1 if window is not None and config.window_rope is not None else 0 for window in config.windows
        ]

    def narrow_attention(self, window: int, sink_tokens: int) -> None:
        """Gives every layer a window, beside which the first `sink_tokens` are seen (Xiao et al., 2023).

        Positions stay those of the text. Raises ModelError for a model that has windows.
        """
        if any(own is not None for own in self.config.windows):
            raise ModelError("attention_window is for models without windows, and this one has its own; leave it out")
        self.config = replace(self.config, windows=(window,) * len(self.layers))
        self.sink_tokens = sink_tokens
        for layer in self.layers:
            layer.attention.narrow(window, sink_tokens)

    def communicate(self, communicators: Communicators) -> None:
        """Joins the other ranks of the layout."""
        self.communicators = communicators
        for layer in self.layers:
            layer.stage = communicators.stage

    @property
    def dtype(self) -> torch.dtype:
        """Of activations, and of the weights that are not stored in another one."""
        return self.layers[0].input_norm.dtype

    def tie(self) -> None:
        """Gives the head the embedding as its weight, if config.json says that they are one."""
        if self.is_tied and self.head.weights_to_pack:
            self.head.weight = self.embedding

    def store_as(self, dtype: torch.dtype) -> None:
        """Gives the embedding and the matrices of linear layers and experts this dtype, before they are filled."""
        if self.embedding is not None:
            self.embedding = nn.Parameter(self.embedding.to(dtype))
        for module in self.matrices():
            module.store_as(dtype)
        self.tie()

    def choose_kernels(self, kernels: Kernels) -> None:
        """Keeps each matrix quantised that was outlined so and has a kernel; the others will be dequantised."""
        for module in self.matrices():
            module.choose(kernels)

    def pack(self, weight_format: WeightFormat) -> None:
        """Packs every linear layer, the head included, and every expert. What is looked up by rows stays, the
        embedding, and what takes part in choices or in attention, the routers and the factors of latent attention.
        What is quantised already stays, too."""
        for module in self.matrices():
            if module.weights_to_pack:
                module.pack(weight_format)
                self.packed_format = weight_format.name

    @property
    def held_as(self) -> str | None:
        """The format of most weights that methods multiply by; None where torch has them all."""
        return next(iter(self.weights_by_format), None)

    @property
    def weights_by_format(self) -> dict[str, int]:
        """Format → how many weights of matrices are held so, most first; without those that are left to torch."""
        weights: Counter[str] = Counter()
        for module in self.matrices():
            name = self.packed_format if module.kept_as is None else module.kept_as
            if name is not None:
                weights[name] += module.num_weights
        return dict(weights.most_common())

    @property
    def num_matrix_weights(self) -> int:
        return sum(module.num_weights for module in self.matrices())

    @property
    def num_kept_weights(self) -> int:
        """Of matrices that stay as a checkpoint has quantised them."""
        return sum(module.num_weights for module in self.matrices() if module.kept_as is not None)

    @property
    def is_tied(self) -> bool:
        """Whether the head here is the embedding."""
        return self.config.tie_embeddings and self.head is not None

    def matrices(self) -> list[Linear | MixtureOfExperts]:
        return [module for module in self.modules() if isinstance(module, Linear | MixtureOfExperts)]

    @property
    def num_parameters(self) -> int:
        """Weights of the checkpoint, however they are held; a tied head counts once."""
        packed = sum(module.packed_parameters for module in self.matrices())
        if self.is_tied:
            packed -= self.head.packed_parameters
        return packed + sum(p.numel() for p in self.parameters())

    @property
    def weight_bytes(self) -> int:
        packed = sum(module.packed_bytes for module in self.matrices())
        return packed + sum(p.nbytes for p in self.parameters())

    def weight_bytes_in(self, weight_format: WeightFormat) -> int:
        """`weight_bytes` after `pack`, without scales and padding. A tied head is then a matrix of its own."""
        assert self.packed_format is None, "not packed yet"
        change = sum(
            module.weights_to_pack * (weight_format.bytes_per_weight - module.matrices()[0].element_size())
            for module in self.matrices()
        )
        tied = self.is_tied and self.head.weights_to_pack
        return self.weight_bytes + int(change) + (self.embedding.nbytes if tied else 0)

    @property
    def widest_activation(self) -> int:
        """Numbers of one token in the widest layer: what a matrix gives, or what all its chosen experts give."""
        linear = [
            module.out_features for module in self.matrices() if module is not self.head and isinstance(module, Linear)
        ]
        experts = [m.num_chosen * m.gate_up.shape[1] for m in self.matrices() if isinstance(m, MixtureOfExperts)]
        return max(linear + experts)

    @property
    def expansion(self) -> Expansion | None:
        """Of latent attention that may expand its latents."""
        attention = self.layers[0].attention
        return attention.expansion(self.dtype) if isinstance(attention, LatentAttention) else None

    @property
    def kv_layout(self) -> KVLayout:
        return self.layers[0].attention.kv_layout

    def rope_bytes(self, max_len: int) -> int:
        """That `make_rope` takes at its peak: half a table of angles, their copy, and cos and sin twice."""
        table = max_len * self.layers[0].attention.rotary_dim * 4
        # Another table is made beside the first, of which cos and sin are left.
        return (
            0 if self.config.rope is None else table * 11 // 2 + (0 if self.config.window_rope is None else 2 * table)
        )

    def make_rope(self, max_len: int, device: torch.device) -> None:
        """Angles for positions below `max_len`, in the dtype of the weights."""
        self.rope_tables = []
        for config in (self.config.rope, self.config.window_rope):
            if config is not None:
                table = rope_table(config, self.layers[0].attention.rotary_dim, max_len)
                cos, sin = (part.to(device, self.dtype)[:, None, :] for part in table)
                self.rope_tables.append((cos, sin))

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        operations: Operations,
        attention: AttentionBackend,
        kv_cache: KVCache,
        taps: Taps | None = None,
    ) -> torch.Tensor:
        """The pass of one process: `taps` are filled, and say where it ends early."""
        return self.run_layers(self.embed(ids), positions, slots, operations, attention, kv_cache, taps)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [num_tokens] → the residual stream that the first layer reads [num_tokens, hidden_size]. First stage."""
        if len(self.tokens) == self.config.vocab_size:
            residual = F.embedding(ids, self.embedding).to(self.dtype)
        else:
            residual = self.communicators.stage.all_reduce(embedded(ids, self.embedding, self.tokens).to(self.dtype))
        if self.config.embedding_scale is not None:
            residual = residual * torch.tensor(self.config.embedding_scale, dtype=residual.dtype)
        return residual

    def run_layers(
        self,
        residual: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        operations: Operations,
        attention: AttentionBackend,
        kv_cache: KVCache,
        taps: Taps | None = None,
    ) -> torch.Tensor:
        """The residual stream [num_tokens, hidden_size], which may be overwritten, → that behind the stage's layers, or
        after the last norm where the stage is the last. `taps` are of the stage's layers."""
        ropes = [Rope(*table, positions) for table in self.rope_tables] or [None]
        steps = [Step(operations, attention, slots, rope) for rope in ropes]
        norm, eps = self.config.norm, self.config.norm_eps
        normed = operations.norm(norm, residual, self.layers[0].input_norm, eps)
        joined, begin = self.joined(operations, attention, kv_cache), 0
        for end in (len(self.layers),) if taps is None else taps.stops(len(self.layers)):
            layers = range(begin, end)
            if joined is not None:
                normed = joined(normed, residual, positions, attention.inputs, layers)
            else:
                normed, residual = self._apart(layers, normed, residual, steps, kv_cache)
            begin = end
            if taps is not None:
                taps.take(end, residual)
        if self.norm is None:
            return residual
        return normed if begin == len(self.layers) else operations.norm(norm, residual, self.norm, eps)

    def _apart(
        self, layers: range, normed: torch.Tensor, residual: torch.Tensor, steps: list[Step], kv_cache: KVCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """These layers, one by one: the norm behind the last of them, and the residual stream. `steps` differ in their
        angles."""
        norm, eps, operations = self.config.norm, self.config.norm_eps, steps[0].operations
        caches, following = kv_cache.layers(), self._following_norms()
        for index in layers:
            x, residual = self.layers[index](normed, residual, steps[self._tables_of_layers[index]], caches[index])
            normed, residual = operations.add_norm(norm, x, residual, following[index], eps)
        return normed, residual

    def _following_norms(self) -> list[torch.Tensor]:
        """The norm behind each layer: the next one's first, or the last of all. The next stage computes its own first
        one; kernels that add and normalise get any here."""
        last = self.layers[-1].input_norm if self.norm is None else self.norm
        return [layer.input_norm for layer in self.layers[1:]] + [last]

    def joined(self, operations: Operations, attention: AttentionBackend, kv_cache: KVCache) -> CppLayers | None:
        """All layers as one call, made once for an engine's kernels and cache; None where each part is called.

        Then no reference to the cache stays: a cache that was allocated as a probe must give its memory back."""
        (known_operations, known_attention, known_cache), joined = self._joined
        same_kernels = operations is known_operations and attention is known_attention
        if same_kernels and (joined is None or known_cache is kv_cache):
            return joined
        joined = self._join(operations, attention, kv_cache)
        self._joined = (operations, attention, None if joined is None else kv_cache), joined
        return joined

    def _join(self, operations: Operations, attention: AttentionBackend, kv_cache: KVCache) -> CppLayers | None:
        config, first = self.config, self.layers[0]
        in_kernels = isinstance(operations, CppOperations) and isinstance(attention, CppAttention)
        if not in_kernels or config.norm not in SHIFTS:
            return None
        tables = [self.rope_tables[table] if self.rope_tables else None for table in self._tables_of_layers]
        layers = zip(self.layers, self._following_norms(), tables, strict=True)
        parts = [layer.cpp_parts(norm, table) for layer, norm, table in layers]
        if None in parts:
            return None
        return CppLayers(library(), parts, kv_cache, config.norm, config.norm_eps, first.mlp.gate)

    def logits(
        self, hidden: torch.Tensor, out: torch.Tensor | None = None, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """[rows, hidden_size] → [rows, vocab_size] in `dtype`; `out` is filled and returned where it is given. The
        ranks of the first stage call it together, and each gets all tokens."""
        head, cap = self.head, self.config.logit_cap
        if len(self.tokens) < self.config.vocab_size:
            logits = gathered_logits(head(hidden), self.config.vocab_size, self.communicators.stage)
            logits = logits.to(dtype) if out is None else out.copy_(logits)
        elif out is not None and out.dtype == hidden.dtype and head.method is None and head.bias is None:
            logits = torch.mm(hidden, head.weight.t(), out=out)  # no copy
        else:
            logits = head(hidden)
            logits = logits.to(dtype) if out is None else out.copy_(logits)
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def shape(self, kv_dtype: torch.dtype | None = None) -> ModelShape:
        """What a step's FLOPs and bytes depend on: of the rank, but for the vocabulary."""
        read = self.weight_bytes
        if self.embedding is not None and self.head.weight is not self.embedding:
            read -= self.embedding.nbytes  # rows are gathered from it, it is not read as a whole
        experts = None
        if mixtures := [layer.mlp for layer in self.layers if isinstance(layer.mlp, MixtureOfExperts)]:
            one = mixtures[0]
            experts = ExpertShape(len(mixtures), len(one.held), one.chosen_here, one.expert_bytes)
            read -= experts.num_layers * experts.num_experts * experts.expert_bytes
        return ModelShape(
            vocab_size=self.config.vocab_size,
            hidden_size=self.config.hidden_size,
            attention_parameters=sum(layer.attention.active_parameters for layer in self.layers),
            mlp_parameters=sum(layer.mlp.active_parameters for layer in self.layers),
            pair_flops=self.layers[0].attention.pair_flops,
            windows=tuple((own and own + self.sink_tokens, n) for own, n in Counter(self.config.windows).items()),
            kv_bytes_per_token=bytes_per_token(self.kv_layout, len(self.layers), kv_dtype or self.dtype),
            weight_bytes=read,
            experts=experts,
            expansion=self.expansion,
            sink_tokens=self.sink_tokens,
        )

    def parts(self) -> dict[str, LinearPart]:
        """The linear modules of the layers, under the checkpoint's names."""
        found: dict[str, LinearPart] = {}
        for prefix, layer in self._named_layers():
            found |= layer.attention.parts(f"{prefix}.self_attn") | layer.mlp.parts(f"{prefix}.mlp")
        return found

    @property
    def own_head(self) -> int:
        """Weights of a head that is tied to the embedding but held apart from it."""
        return self.head.num_weights if self.is_tied and not self.head.weights_to_pack else 0

    def quantisable(self) -> set[str]:
        """Checkpoint names of the matrices of linear layers and experts, without the head's and the embedding's."""
        stacks = {storage_of(part) for module in self.matrices() if module is not self.head
                  for part in module.matrices() if part is not None}  # fmt: skip
        return {name for name, target in self.slices().items() if storage_of(target) in stacks and target.dim() == 2}

    def slices(self) -> dict[str, torch.Tensor]:
        """Checkpoint name → the part of our fused parameters that it fills, as views. Layers ask their parts."""
        targets = {}
        if self.embedding is not None:
            targets["model.embed_tokens.weight"] = self.embedding
            if not self.config.tie_embeddings:
                targets["lm_head.weight"] = self.head.weight
        if self.norm is not None:
            targets["model.norm.weight"] = self.norm
        for prefix, layer in self._named_layers():
            targets |= layer.slices(prefix)
        return targets

    def cuts(self) -> Cuts:
        """What the rank holds of the tensors of its layers, of embedding, head and norm; whole are those that are not
        named."""
        if self.layout.size == 1:
            return {}
        found: Cuts = {}
        if self.norm is None:
            found["model.norm.weight"] = None
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            if self.embedding is None:
                found[name] = None
            elif len(self.tokens) < self.config.vocab_size:
                found[name] = Cut(0, self.tokens.start, self.tokens.stop, self.config.vocab_size)
        for prefix, layer in self._named_layers():
            found |= layer.cuts(prefix)
        return found

    def _named_layers(self) -> list[tuple[str, Layer]]:
        """With their names in the checkpoint."""
        return [(f"model.layers.{self.first_layer + index}", layer) for index, layer in enumerate(self.layers)]
