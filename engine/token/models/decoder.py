"""The decoder that all families share, and how a checkpoint fills it."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from engine.compute.attention.backend import AttentionBackend
from engine.compute.attention.cpp_backend import CppAttention
from engine.compute.cpp.extension import library
from engine.compute.kv_cache import KVCache, KVLayout, bytes_per_token
from engine.compute.layers_cpp import CppLayers, RopeTable
from engine.compute.linear import Linear, LinearPart
from engine.compute.operations.backend import Operations, Rope, Step
from engine.compute.operations.cpp_backend import SHIFTS, CppOperations
from engine.compute.quantisation.kernels import Kernels
from engine.compute.quantisation.matrix import QuantisedMatrix
from engine.compute.quantisation.parts import storage_of
from engine.compute.weight_formats import WeightFormat
from engine.token.models.filling import Filling, check_fits
from engine.token.models.latent import LatentAttention
from engine.token.models.layer import DecoderConfig, Layer, Stored
from engine.token.models.moe import MixtureOfExperts
from engine.token.models.rope import rope_table
from engine.token.models.taps import Taps
from engine.token.models.weight_file import FileTensor
from metrics.compute.cost_model import Expansion, ExpertShape, ModelShape
from metrics.errors import ModelError


class Decoder(nn.Module):
    """ids and positions, each [num_tokens] → hidden states [num_tokens, hidden_size]; `logits` for chosen rows."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(
            Layer(config, config.attention(window), mlp())
            for window, mlp in zip(config.windows, config.mlps, strict=True)
        )
        self.norm = nn.Parameter(torch.empty(config.hidden_size))
        self.head = Linear(config.hidden_size, config.vocab_size)
        self.tie()
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

    def tie(self) -> None:
        """Gives the head the embedding as its weight, if config.json says that they are one."""
        if self.config.tie_embeddings and self.head.weights_to_pack:
            self.head.weight = self.embedding

    def store_as(self, dtype: torch.dtype) -> None:
        """Gives the embedding and the matrices of linear layers and experts this dtype, before they are filled."""
        self.embedding = nn.Parameter(self.embedding.to(dtype))
        for module in self._matrices():
            module.store_as(dtype)
        self.tie()

    def choose_kernels(self, kernels: Kernels) -> None:
        """Keeps each matrix quantised that was outlined so and has a kernel; the others will be dequantised."""
        for module in self._matrices():
            module.choose(kernels)

    def pack(self, weight_format: WeightFormat) -> None:
        """Packs every linear layer, the head included, and every expert. What is looked up by rows stays, the
        embedding, and what takes part in choices or in attention, the routers and the factors of latent attention.
        What is quantised already stays, too."""
        for module in self._matrices():
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
        for module in self._matrices():
            name = self.packed_format if module.kept_as is None else module.kept_as
            if name is not None:
                weights[name] += module.num_weights
        return dict(weights.most_common())

    @property
    def num_matrix_weights(self) -> int:
        return sum(module.num_weights for module in self._matrices())

    @property
    def num_kept_weights(self) -> int:
        """Of matrices that stay as a checkpoint has quantised them."""
        return sum(module.num_weights for module in self._matrices() if module.kept_as is not None)

    def _matrices(self) -> list[Linear | MixtureOfExperts]:
        return [module for module in self.modules() if isinstance(module, Linear | MixtureOfExperts)]

    @property
    def num_parameters(self) -> int:
        """Weights of the checkpoint, however they are held; a tied head counts once."""
        packed = sum(module.packed_parameters for module in self._matrices())
        if self.config.tie_embeddings:
            packed -= self.head.packed_parameters
        return packed + sum(p.numel() for p in self.parameters())

    @property
    def weight_bytes(self) -> int:
        packed = sum(module.packed_bytes for module in self._matrices())
        return packed + sum(p.nbytes for p in self.parameters())

    def weight_bytes_in(self, weight_format: WeightFormat) -> int:
        """`weight_bytes` after `pack`, without scales and padding. A tied head is then a matrix of its own."""
        assert self.packed_format is None, "not packed yet"
        stored = self.embedding.element_size()
        change = sum(module.weights_to_pack * (weight_format.bytes_per_weight - stored) for module in self._matrices())
        tied = self.config.tie_embeddings and self.head.weights_to_pack
        return self.weight_bytes + int(change) + (self.embedding.nbytes if tied else 0)

    @property
    def widest_activation(self) -> int:
        """Numbers of one token in the widest layer: what a matrix gives, or what all its chosen experts give."""
        linear = [
            module.out_features for module in self._matrices() if module is not self.head and isinstance(module, Linear)
        ]
        experts = [m.num_chosen * m.gate_up.shape[1] for m in self._matrices() if isinstance(m, MixtureOfExperts)]
        return max(linear + experts)

    @property
    def expansion(self) -> Expansion | None:
        """Of latent attention that may expand its latents."""
        attention = self.layers[0].attention
        return attention.expansion(self.norm.dtype) if isinstance(attention, LatentAttention) else None

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
                cos, sin = (part.to(device, self.norm.dtype)[:, None, :] for part in table)
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
        """`taps` are filled, and say where the pass ends early."""
        residual = F.embedding(ids, self.embedding).to(self.norm.dtype)
        if self.config.embedding_scale is not None:
            residual = residual * torch.tensor(self.config.embedding_scale, dtype=residual.dtype)
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
        """The norm behind each layer: the next one's first, or the last of all."""
        return [layer.input_norm for layer in self.layers[1:]] + [self.norm]

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
        """[rows, hidden_size] → [rows, vocab_size] in `dtype`; `out` is filled and returned where it is given."""
        head, cap = self.head, self.config.logit_cap
        if out is not None and out.dtype == hidden.dtype and head.method is None and head.bias is None:
            logits = torch.mm(hidden, head.weight.t(), out=out)  # no copy
        else:
            logits = head(hidden)
            logits = logits.to(dtype) if out is None else out.copy_(logits)
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def shape(self, kv_dtype: torch.dtype | None = None) -> ModelShape:
        """What a step's FLOPs and bytes depend on."""
        read = self.weight_bytes
        if self.head.weight is not self.embedding:
            read -= self.embedding.nbytes  # rows are gathered from it, it is not read as a whole
        experts = None
        if mixtures := [layer.mlp for layer in self.layers if isinstance(layer.mlp, MixtureOfExperts)]:
            one = mixtures[0]
            experts = ExpertShape(len(mixtures), one.num_experts, one.num_chosen, one.expert_bytes)
            read -= experts.num_layers * experts.num_experts * experts.expert_bytes
        return ModelShape(
            vocab_size=self.config.vocab_size,
            hidden_size=self.config.hidden_size,
            attention_parameters=sum(layer.attention.active_parameters for layer in self.layers),
            mlp_parameters=sum(layer.mlp.active_parameters for layer in self.layers),
            pair_flops=self.layers[0].attention.pair_flops,
            windows=tuple((own and own + self.sink_tokens, n) for own, n in Counter(self.config.windows).items()),
            kv_bytes_per_token=bytes_per_token(self.kv_layout, len(self.layers), kv_dtype or self.norm.dtype),
            weight_bytes=read,
            experts=experts,
            expansion=self.expansion,
            sink_tokens=self.sink_tokens,
        )

    def parts(self) -> dict[str, LinearPart]:
        """The linear modules of the layers, under the checkpoint's names."""
        found: dict[str, LinearPart] = {}
        for index, layer in enumerate(self.layers):
            prefix = f"model.layers.{index}"
            found |= layer.attention.parts(f"{prefix}.self_attn") | layer.mlp.parts(f"{prefix}.mlp")
        return found

    def load(self, weights: Iterable[tuple[str, Stored | FileTensor]], packs: WeightFormat | None = None) -> None:
        """Fills every parameter. Raises ModelError for a tensor that is missing, unknown or of another shape.

        With `packs` a matrix is packed once it is filled.
        A quantised matrix goes to its layer where the weight is of the meta device: on an outline all are, and once
        `choose_kernels` was called those that stay quantised. Elsewhere it is dequantised.
        """
        missing = self._slices()
        owners, filling = self._owners(), Filling(self._matrices(), missing.values(), packs)
        left_out = sum(part.numel() for module in self._matrices() for part in module.matrices()
                       if not isinstance(part, nn.Parameter))  # fmt: skip
        filled = sum(t.numel() for t in missing.values())
        touched: set[Linear | MixtureOfExperts] = set()
        assert filled == sum(p.numel() for p in self.parameters()) + left_out - self._own_head, "all are filled"
        for stored_name, stored in weights:
            if stored_name.endswith("rotary_emb.inv_freq"):
                continue  # old checkpoints store what config.json says
            in_file = isinstance(stored, FileTensor)
            for name, tensor in self.config.translate(stored_name, stored.outline if in_file else stored):
                if name == "lm_head.weight" and self.config.tie_embeddings:
                    continue
                target = missing.pop(name, None)
                if target is None and name.endswith(".bias") and not tensor.is_meta and not tensor.any():
                    continue  # quantisers wrote one for every layer
                if target is None:
                    raise ModelError(
                        f"tensor {stored_name} has no place in this architecture; is config.json of another model?"
                    )
                check_fits(stored_name, tensor, target)
                if isinstance(tensor, QuantisedMatrix):
                    tensor.check(stored_name)
                    touched |= self._place(target, tensor, owners)
                elif in_file:
                    stored.fill(target, tensor)
                else:
                    target.copy_(tensor)
                filling.filled(target)
            touched -= {module for module in touched if self._finish(module, missing)}
        if filling.has_packed:
            self.packed_format = packs.name
        if missing:
            raise ModelError(f"weights lack {len(missing)} tensors, among them {sorted(missing)[0]}")

    @property
    def _own_head(self) -> int:
        """Weights of a head that is tied to the embedding but held apart from it."""
        return self.head.num_weights if self.config.tie_embeddings and not self.head.weights_to_pack else 0

    def place_quantised(self, make: Callable[[str, int, int], QuantisedMatrix | None]) -> None:
        """Hands each matrix without memory a source of (module, outputs, inputs), as a checkpoint names them; None
        leaves one dense. On an outline those are all matrices."""
        owners = self._owners()
        for name, target in self._slices().items():
            owner = owners.get(storage_of(target))
            if owner is None or storage_of(target) == storage_of(self.embedding):
                continue
            if (matrix := make(name.removesuffix(".weight"), *target.shape)) is not None:
                owner.place(target, matrix)
                self._finish(owner, {})

    def quantisable(self) -> set[str]:
        """Checkpoint names of the matrices of linear layers and experts, without the head's and the embedding's."""
        stacks = {storage_of(part) for module in self._matrices() if module is not self.head
                  for part in module.matrices() if part is not None}  # fmt: skip
        return {name for name, target in self._slices().items() if storage_of(target) in stacks and target.dim() == 2}

    def _owners(self) -> dict[int, Linear | MixtureOfExperts]:
        """Storage of a weight without memory → its layer."""
        return {storage_of(part): module for module in self._matrices() for part in module.matrices() if part.is_meta}

    def _place(
        self, target: torch.Tensor, matrix: QuantisedMatrix, owners: dict[int, Linear | MixtureOfExperts]
    ) -> set[Linear | MixtureOfExperts]:
        """Hands a source to the layers that hold it quantised, and returns them."""
        taken = set()
        is_embedding = storage_of(target) == storage_of(self.embedding)
        if (owner := owners.get(storage_of(target))) is not None:
            owner.place(target, matrix)
            taken.add(owner)
        if is_embedding and self._own_head:
            self.head.place(self.head.weight, matrix)
            taken.add(self.head)
        if owner is None or is_embedding:
            target.copy_(matrix.dequantised())
        return taken

    def _finish(self, module: Linear | MixtureOfExperts, missing: dict[str, torch.Tensor]) -> bool:
        """Makes the layer's method once its sources and biases have come: codes need not wait for other layers."""
        if not module.placed:
            return False
        biases = {storage_of(bias) for bias in module.biases()}
        if biases and biases & {storage_of(target) for target in missing.values()}:
            return False
        module.finish()
        return True

    def _slices(self) -> dict[str, torch.Tensor]:
        """Checkpoint name → the part of our fused parameters that it fills, as views. Layers ask their parts."""
        targets = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        if not self.config.tie_embeddings:
            targets["lm_head.weight"] = self.head.weight
        for index, layer in enumerate(self.layers):
            targets |= layer.slices(f"model.layers.{index}")
        return targets
