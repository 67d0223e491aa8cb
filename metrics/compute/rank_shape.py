"""What one rank of a deployment holds and computes: its share of weights, of keys and values, and its ModelShape."""

import msgspec

from sojourn.metrics.compute.cost_model import Expansion, ExpertShape, ModelShape
from sojourn.metrics.compute.model_sizes import ModelSizes
from sojourn.metrics.compute.number_formats import NumberFormat, kv_format
from sojourn.metrics.compute.stored_weights import Part, StoredWeights, chosen_weights
from sojourn.metrics.errors import InputError

EXPANDED_AT_MOST = 1 << 40  # servers for GPUs expand the latents of every chunk


class RankWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one rank. Embedding, head, matrices and experts are divided; norms, biases and routers are not."""

    embedding: int
    head: int
    attention: int
    mlp: int
    experts: int
    others: int  # norms, biases, sinks and routers

    @property
    def total(self) -> int:
        return self.embedding + self.head + self.attention + self.mlp + self.experts + self.others


def check_parallel(sizes: ModelSizes, tensor_parallel: int, expert_parallel: int = 1) -> None:
    """Raises InputError for a degree that the model's sizes do not allow, with those that they do."""
    allowed = [degree for degree in range(1, 65) if sizes.num_heads % degree == 0]
    if tensor_parallel not in allowed:
        raise InputError(
            f"{sizes.name} has {sizes.num_heads} attention heads, which a tensor parallel degree of {tensor_parallel} "
            f"does not divide; it can be {', '.join(map(str, allowed))}"
        )
    if expert_parallel == 1:
        return
    if sizes.experts is None:
        raise InputError(f"{sizes.name} has no experts, so expert parallelism divides nothing; leave it out")
    count = sizes.experts.num_experts
    fits = [degree for degree in range(1, tensor_parallel + 1) if tensor_parallel % degree == count % degree == 0]
    if expert_parallel not in fits:
        raise InputError(
            f"expert parallel degree {expert_parallel} must divide the tensor parallel degree {tensor_parallel} and "
            f"the {count} experts of {sizes.name}; it can be {', '.join(map(str, fits))}"
        )


def rank_weights(sizes: ModelSizes, weights: str = "auto", tensor_parallel: int = 1) -> RankWeights:
    """`weights` is a format of number_formats.py, or auto: as the checkpoint stores them."""
    stored = chosen_weights(sizes.stored, weights, has_experts=sizes.experts is not None)
    divided = sizes.attention - sizes.attention_whole
    return RankWeights(
        embedding=stored.plain.bytes_of(sizes.embedding / tensor_parallel),
        head=stored.plain.bytes_of(sizes.head / tensor_parallel),
        attention=_packed(stored, "attention", divided / tensor_parallel + sizes.attention_whole),
        mlp=_packed(stored, "mlp", sizes.mlp / tensor_parallel),
        experts=_packed(stored, "experts", sizes.routed / tensor_parallel),
        others=stored.plain.bytes_of(sizes.vectors + sizes.routers),
    )


def _packed(stored: StoredWeights, part: Part, numbers: float) -> int:
    share = 0.0 if stored.packed is None else stored.shares.get(part, 0.0)
    packed = 0.0 if stored.packed is None else stored.packed.bytes_each * share
    return round(numbers * (packed + stored.plain.bytes_each * (1 - share)))


def kv_numbers_of_layer(sizes: ModelSizes, tensor_parallel: int = 1) -> int:
    """That a rank keeps of one token. A latent is not divided, and a head of keys and values is not either."""
    if sizes.latents is not None:
        return sizes.kv_numbers_of_layer
    return 2 * -(-sizes.num_kv_heads // tensor_parallel) * sizes.head_dim


def kv_bytes_per_token(sizes: ModelSizes, kv: str | NumberFormat = "bf16", tensor_parallel: int = 1) -> int:
    """Of one rank, all layers."""
    each = kv_format(kv) if isinstance(kv, str) else kv
    return each.bytes_of(sizes.num_layers * kv_numbers_of_layer(sizes, tensor_parallel))


def kv_bytes_of_sequence(sizes: ModelSizes, tokens: float, kv: str = "bf16", tensor_parallel: int = 1) -> float:
    """Of one rank: layers with a window keep no more than that."""
    each = kv_format(kv).bytes_each * kv_numbers_of_layer(sizes, tensor_parallel)
    return each * sum(layers * (tokens if window is None else min(tokens, window)) for window, layers in sizes.windows)


def rank_shape(
    sizes: ModelSizes, weights: str = "auto", kv: str = "bf16", tensor_parallel: int = 1, expert_parallel: int = 1
) -> ModelShape:
    """The cost coefficients of one rank, its share of the vocabulary included. Raises InputError."""
    check_parallel(sizes, tensor_parallel, expert_parallel)
    held = rank_weights(sizes, weights, tensor_parallel)
    head = sizes.hidden_size * sizes.vocab_size
    read = held.total - held.experts
    read -= held.embedding if sizes.head else round(held.embedding * (1 - head / sizes.embedding))
    heads = sizes.num_heads // tensor_parallel
    experts, e = None, sizes.experts
    if e is not None:
        # Of whole experts a rank has some; of divided ones it has a part of each.
        count = e.num_experts // expert_parallel
        experts = ExpertShape(
            e.num_layers, count, e.num_chosen / expert_parallel, round(held.experts / (e.num_layers * count))
        )
    latents, expansion = sizes.latents, None
    pair_flops = 4 * heads * sizes.head_dim
    if latents is not None:
        pair_flops = 2 * heads * (2 * latents.rank + latents.rope_dim)
        expanded = latents.nope_dim + latents.value_dim
        expansion = Expansion(
            saved_pair_flops=2 * heads * (2 * latents.rank - expanded),
            position_flops=2 * heads * expanded * latents.rank,
            most_context=EXPANDED_AT_MOST,
        )
    divided = sizes.attention - sizes.attention_whole
    biases = 0 if e is None else e.parameters - 3 * sizes.hidden_size * e.inner_size
    chosen = 0 if e is None else e.num_layers * e.num_chosen * (e.parameters - biases)
    return ModelShape(
        vocab_size=-(-sizes.vocab_size // tensor_parallel),
        hidden_size=sizes.hidden_size,
        attention_parameters=divided // tensor_parallel + sizes.attention_whole,
        mlp_parameters=(sizes.mlp + chosen) // tensor_parallel + sizes.routers,
        pair_flops=pair_flops,
        windows=sizes.windows,
        kv_bytes_per_token=kv_bytes_per_token(sizes, kv, tensor_parallel),
        weight_bytes=read,
        experts=experts,
        expansion=expansion,
    )
