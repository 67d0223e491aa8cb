"""How many weights a decoder has, by what they do, from its config.json alone; and its keys and values.

Counts are exact for the families of model_families.py: those of transformers, and those that authors publish.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from sojourn.metrics.compute.config_layers import layers_of, number
from sojourn.metrics.compute.cost_model import Windows
from sojourn.metrics.compute.model_families import Family, completed_text, family_of
from sojourn.metrics.compute.stored_weights import StoredWeights, stored_weights
from sojourn.metrics.errors import ModelError

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
CHOSEN = ("num_experts_per_tok", "experts_per_token", "top_k_experts", "moe_topk")


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """The routed experts."""

    num_layers: int  # that have them
    num_experts: int  # in each
    num_chosen: int
    parameters: int  # of one, its biases included
    inner_size: int


class Latents(msgspec.Struct, frozen=True, kw_only=True):
    """Multi-head latent attention. Sizes are of one head, but for `rank`."""

    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int


class Counted(NamedTuple):
    """Weights of one part of a model."""

    matrices: int
    whole: int  # of which each rank of a tensor-parallel group has all: of `matrices`, or the routers beside them
    vectors: int


class ModelSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of weights are of all layers."""

    name: str
    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: Windows  # (last tokens that a token sees, or None; layers)
    embedding: int  # with a table of positions
    head: int  # 0: it is the embedding
    attention: int
    attention_whole: int  # of `attention`: each rank of a tensor-parallel group has them whole
    mlp: int  # dense feed-forward parts and shared experts
    routers: int
    vectors: int  # norms, biases and sinks
    experts: Experts | None = None
    latents: Latents | None = None
    longest: int = 0  # tokens of a sequence at most; 0: not said
    stored: StoredWeights
    is_language_part: bool = False  # images or sound have a part of their own, which is not counted

    @property
    def num_layers(self) -> int:
        return sum(layers for _, layers in self.windows)

    @property
    def routed(self) -> int:
        """Weights of all experts."""
        e = self.experts
        return 0 if e is None else e.num_layers * e.num_experts * e.parameters

    @property
    def parameters(self) -> int:
        return self.embedding + self.head + self.attention + self.mlp + self.routers + self.vectors + self.routed

    @property
    def chosen(self) -> int:
        """Weights of the experts that one token is sent to."""
        e = self.experts
        return 0 if e is None else e.num_layers * e.num_chosen * e.parameters

    @property
    def active_parameters(self) -> int:
        """That a token which is sampled is multiplied by."""
        return self.attention + self.mlp + self.routers + self.chosen + self.hidden_size * self.vocab_size

    @property
    def kv_numbers_of_layer(self) -> int:
        """Numbers that a layer keeps of one token, whole."""
        if self.latents is not None:
            return self.latents.rank + self.latents.rope_dim
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def kv_numbers_per_token(self) -> int:
        return self.num_layers * self.kv_numbers_of_layer


def model_sizes(whole: Mapping[str, Any], name: str = "the model") -> ModelSizes:
    """Of a config.json. Raises ModelError with a sentence where its weights cannot be counted."""
    config = completed_text(whole)
    kind, family = family_of(config)
    hidden, count = _needed(config, "hidden_size"), _needed(config, "num_hidden_layers")
    heads, vocab = _needed(config, "num_attention_heads"), _needed(config, "vocab_size")
    head_dim, kv_heads = number(config, "head_dim") or hidden // heads, number(config, "num_key_value_heads") or heads
    if heads % kv_heads:
        raise ModelError(f"{name} has {heads} attention heads, which {kv_heads} heads of keys and values do not divide")
    latents = _latents(config)
    if latents is None:
        attention = _grouped(hidden, heads, kv_heads, head_dim, family, config)
    else:
        attention = _latent(hidden, heads, latents, config)
        head_dim, kv_heads = latents.nope_dim + latents.rope_dim, 1
    if not head_dim:
        raise ModelError(f"{name} has a hidden size of {hidden} for {heads} heads, so its heads have no size")
    mixture = _mixture_layers(config, count)
    experts, of_mixture = _experts(config, family, hidden, len(mixture))
    inner, of_dense = _dense(config, family, hidden, count - len(mixture))
    norm = hidden * (2 if family.norm_bias else 1)
    positions = 0 if family.positions is None else number(config, "max_position_embeddings") + family.positions
    return ModelSizes(
        name=name,
        family=kind,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        windows=_windows(config, count, name),
        embedding=(vocab + positions) * hidden,
        head=0 if config.get("tie_word_embeddings") else vocab * hidden,
        attention=count * attention.matrices,
        attention_whole=count * attention.whole,
        mlp=of_dense.matrices + of_mixture.matrices,
        routers=of_mixture.whole,
        vectors=count * (family.norms * norm + attention.vectors) + of_dense.vectors + of_mixture.vectors + norm,
        experts=experts,
        latents=latents,
        longest=number(config, "max_position_embeddings"),
        stored=stored_weights(config, count, sorted(mixture)),
        is_language_part=any("vision" in key or "audio" in key for key in whole),
    )


def _needed(config: Mapping[str, Any], name: str) -> int:
    if not (value := number(config, name)):
        raise ModelError(f"config.json lacks {name}, or it is no whole number above 0")
    return value


def _has(own: bool | None, config: Mapping[str, Any], key: str) -> bool:
    return bool(config.get(key)) if own is None else own


def _windows(config: Mapping[str, Any], count: int, name: str) -> Windows:
    try:
        kinds = layers_of(config, count)
    except ValueError as error:
        raise ModelError(f"the attention of {name} cannot be counted: {error}") from None
    if others := set(kinds) - {"full", "window"}:
        raise ModelError(
            f"{name} has layers with {'a state of fixed size' if 'state' in others else 'no attention'}; the formulas "
            "here count layers of attention only, over all tokens or a window"
        )
    window = number(config, "sliding_window", "attention_chunk_size")
    if "window" in kinds and not window:
        raise ModelError(f"{name} has layers with a sliding window, and its size is not in config.json")
    counted = Counter(None if kind == "full" else window for kind in kinds)
    return tuple(counted.items())


def _latents(config: Mapping[str, Any]) -> Latents | None:
    if not number(config, "kv_lora_rank"):
        return None
    names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    rank, rope_dim, nope_dim, value_dim = (_needed(config, each) for each in names)
    return Latents(rank=rank, rope_dim=rope_dim, nope_dim=nope_dim, value_dim=value_dim)


def _grouped(
    hidden: int, heads: int, kv_heads: int, head_dim: int, family: Family, config: Mapping[str, Any]
) -> Counted:
    """Of a layer."""
    query, keys = heads * head_dim, kv_heads * head_dim
    vectors = query + 2 * keys if _has(family.query_bias, config, "attention_bias") else 0
    vectors += hidden if _has(family.output_bias, config, "attention_bias") else 0
    vectors += heads if family.sinks else 0
    if family.query_norm and config.get("use_qk_norm") is not False:
        vectors += 2 * head_dim if family.query_norm == "head" else query + keys
    return Counted(hidden * 2 * (query + keys), 0, vectors)


def _latent(hidden: int, heads: int, latents: Latents, config: Mapping[str, Any]) -> Counted:
    """Of a layer. Each rank computes the latents of queries and keys whole."""
    query_rank = number(config, "q_lora_rank")
    query = heads * (latents.nope_dim + latents.rope_dim)
    down = hidden * (query_rank + latents.rank + latents.rope_dim)
    up = query_rank * query if query_rank else hidden * query
    up += latents.rank * heads * (latents.nope_dim + latents.value_dim) + heads * latents.value_dim * hidden
    vectors = latents.rank + query_rank
    if config.get("attention_bias"):
        vectors += query_rank + latents.rank + latents.rope_dim + hidden
    return Counted(down + up, down, vectors)


def _mixture_layers(config: Mapping[str, Any], count: int) -> set[int]:
    """Places of the layers that have experts."""
    if not number(config, *EXPERTS):
        return set()
    if isinstance(listed := config.get("moe_layers"), list):
        return {place for place in listed if isinstance(place, int) and 0 <= place < count}
    if every := number(config, "interleave_moe_layer_step", "decoder_sparse_step"):
        dense = config.get("mlp_only_layers") or []
        return {place for place in range(count) if not (place + 1) % every and place not in dense}
    first, every = number(config, "first_k_dense_replace"), number(config, "moe_layer_freq") or 1
    return {place for place in range(count) if place >= first and not place % every}


def _dense(config: Mapping[str, Any], family: Family, hidden: int, num_layers: int) -> tuple[int, Counted]:
    """The inner size of the feed-forward parts without experts, and their weights in so many layers."""
    if not num_layers:
        return 0, Counted(0, 0, 0)
    usual = 0 if family.gated else 4 * hidden
    if config.get("expansion_ratio"):
        usual = number(config, "expansion_ratio") * hidden
    inner = number(config, "intermediate_size_mlp", "intermediate_size") or usual  # the first one is Llama 4's
    if not inner:
        _needed(config, "intermediate_size")
    matrices = 3 if family.gated else 2
    biases = (matrices - 1) * inner + hidden if _has(family.mlp_bias, config, "mlp_bias") else 0
    return inner, Counted(num_layers * matrices * hidden * inner, 0, num_layers * biases)


def _experts(config: Mapping[str, Any], family: Family, hidden: int, num_layers: int) -> tuple[Experts | None, Counted]:
    """The routed experts; and in so many layers the matrices of shared ones, the routers, and other weights."""
    if not num_layers:
        return None, Counted(0, 0, 0)
    count, chosen = number(config, *EXPERTS), number(config, *CHOSEN)
    if not chosen or chosen > count:
        raise ModelError(f"config.json has {count} experts and sends a token to {chosen or 'no'} of them")
    inner = number(config, "moe_intermediate_size") or _needed(config, "intermediate_size")
    shared_inner = number(config, "n_shared_experts") * inner
    if "shared_expert_intermediate_size" in config:
        shared_inner = number(config, "shared_expert_intermediate_size")
    if config.get("model_type") == "llama4":
        shared_inner = inner
    shared = 3 * hidden * shared_inner + (hidden if family.shared_gate and shared_inner else 0)
    experts = Experts(
        num_layers=num_layers,
        num_experts=count,
        num_chosen=chosen,
        parameters=3 * hidden * inner + (2 * inner + hidden if family.expert_bias else 0),
        inner_size=inner,
    )
    biases = count * (int(family.correction) + int(family.expert_bias))
    return experts, Counted(num_layers * shared, num_layers * count * hidden, num_layers * biases)
