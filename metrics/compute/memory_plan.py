"""How a device's memory is divided: weights, what a step needs beside them, and the rest for keys and values.

The formulas of the field's articles, each with its numbers. Activations are an estimate: servers measure them.
"""

import math

import msgspec

from sojourn.metrics.compute.model_sizes import ModelSizes
from sojourn.metrics.compute.number_formats import kv_format
from sojourn.metrics.compute.rank_shape import (
    RankWeights,
    check_parallel,
    kv_bytes_of_sequence,
    kv_bytes_per_token,
    kv_numbers_of_layer,
    rank_weights,
)
from sojourn.metrics.compute.stored_weights import chosen_weights
from sojourn.metrics.errors import InputError

GIB = 2**30
UTILISATION = 0.9  # of a device's memory that a server takes: vLLM's gpu_memory_utilization
RESERVE = 1 << 30  # context of the driver, libraries of communication, captured graphs
ACTIVATION_BYTES = 2  # of a number between layers
LOGIT_BYTES = 4 + 4 + 2  # of a logit: as it is computed, in float32, and its sorted copy


class Quantity(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the plan: bytes or a count, and the formula with its numbers."""

    name: str
    value: float
    unit: str  # bytes, tokens, requests
    formula: str


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Of one rank. `kv_tokens` are what the pool of the replica holds, whose ranks keep the same tokens."""

    weights: RankWeights
    weight_format: str
    kv_format: str
    device_bytes: float
    utilisation: float
    activation_bytes: int
    reserve_bytes: int
    pool_bytes: float  # below 0: the weights do not fit
    kv_bytes_per_token: int
    kv_tokens: int  # of requests of the given length; without one as if no layer had a window
    lines: list[Quantity]

    @property
    def fits(self) -> bool:
        return self.pool_bytes > 0 and self.kv_tokens > 0


def activation_bytes(sizes: ModelSizes, tensor_parallel: int, batch_tokens: int, most_sequences: int) -> int:
    """Of a step with so many tokens, of which `most_sequences` have logits: the widest layer, or the logits."""
    inner = sizes.intermediate_size
    if sizes.experts is not None:
        inner = max(inner, sizes.experts.num_chosen * sizes.experts.inner_size)
    layer = batch_tokens * (4 * sizes.hidden_size + 3 * inner / tensor_parallel) * ACTIVATION_BYTES
    logits = min(most_sequences, batch_tokens) * sizes.vocab_size * LOGIT_BYTES
    return round(max(layer, logits))


def memory_plan(
    sizes: ModelSizes, device_bytes: float, *, weights: str = "auto", kv: str = "bf16", tensor_parallel: int = 1,
    expert_parallel: int = 1, utilisation: float = UTILISATION, batch_tokens: int = 8192, most_sequences: int = 256,
    length: float | None = None, reserve_bytes: int = RESERVE, is_of_free: bool = False,
) -> MemoryPlan:  # fmt: skip
    """`length` is that of a request at its end, for the number of requests that fit. `is_of_free`: `utilisation` is a
    share of what the rest leaves, as TensorRT-LLM counts it. Raises InputError."""
    check_parallel(sizes, tensor_parallel, expert_parallel)
    if not 0 < utilisation <= 1:
        raise InputError(f"the share of the device's memory is {utilisation:g}; it must be above 0 and at most 1")
    held = rank_weights(sizes, weights, tensor_parallel)
    stored = chosen_weights(sizes.stored, weights, has_experts=sizes.experts is not None)
    activations = activation_bytes(sizes, tensor_parallel, batch_tokens, most_sequences)
    taken = held.total + activations + reserve_bytes
    pool = utilisation * (device_bytes - taken) if is_of_free else utilisation * device_bytes - taken
    device = f"{device_bytes / GIB:,.1f} GiB"
    each = kv_bytes_per_token(sizes, kv, tensor_parallel)
    of_one = kv_bytes_of_sequence(sizes, length, kv, tensor_parallel) if length else 0.0
    tokens = max(0, int(pool / (of_one / length if length else each)))
    divisor = "KV of a token" if not length or all(window is None for window, _ in sizes.windows) else (
        f"{of_one / length:,.0f} bytes of a token in {length:,.0f}, less behind windows"
    )  # fmt: skip
    lines = [
        Quantity(
            name="weights", value=held.total, unit="bytes",
            formula=f"{counted(sizes.parameters)} parameters in {stored.name} / {tensor_parallel} "
            f"{'device' if tensor_parallel == 1 else 'devices'}: {_parts(held)}",
        ),
        Quantity(
            name="activations", value=activations, unit="bytes",
            formula=f"a step of {batch_tokens:,} tokens, logits of {min(most_sequences, batch_tokens):,}; an estimate",
        ),
        Quantity(name="reserve", value=reserve_bytes, unit="bytes",
                 formula="driver, communication and captured graphs; assumed"),
        Quantity(name="KV pool", value=pool, unit="bytes",
                 formula=f"{utilisation:g} × ({device} less what stands above)" if is_of_free
                 else f"{utilisation:g} × {device} less what stands above"),
        Quantity(name="KV of a token", value=each, unit="bytes", formula=kv_formula(sizes, kv, tensor_parallel)),
        Quantity(name="tokens", value=tokens, unit="tokens", formula=f"KV pool / {divisor}"),
    ]  # fmt: skip
    if length:
        lines.append(Quantity(
            name="requests", value=max(0.0, pool) / of_one, unit="requests",
            formula=f"KV pool / KV of a request of {length:,.0f} tokens ({of_one / GIB:,.3g} GiB)",
        ))  # fmt: skip
    return MemoryPlan(
        weights=held, weight_format=stored.name, kv_format=kv_format(kv).name, device_bytes=device_bytes,
        utilisation=utilisation, activation_bytes=activations, reserve_bytes=reserve_bytes, pool_bytes=pool,
        kv_bytes_per_token=each, kv_tokens=tokens, lines=lines,
    )  # fmt: skip


def kv_formula(sizes: ModelSizes, kv: str, tensor_parallel: int = 1) -> str:
    """layers × 2 × heads × head size × bytes; of latents layers × (rank + rotated) × bytes."""
    each = kv_format(kv).bytes_each
    if sizes.latents is not None:
        of_layer = f"({sizes.latents.rank} latent + {sizes.latents.rope_dim} rotated)"
    else:
        heads = kv_numbers_of_layer(sizes, tensor_parallel) // (2 * sizes.head_dim)
        of_layer = f"2 × {heads} KV head{'' if heads == 1 else 's'} × {sizes.head_dim}"
    return f"{sizes.num_layers} layers × {of_layer} × {each:g} bytes"


def counted(number: float) -> str:
    """70.55 B, 2.723 M."""
    return f"{number / 1e9:,.4g} B" if number >= 1e9 else f"{number / 1e6:,.4g} M"


def amount(value: float, unit: str) -> str:
    """A quantity of a plan in words."""
    if unit != "bytes":  # as many as fit whole
        return f"{math.floor(value):,}" if value >= 100 else f"{value:,.3g}"
    for size, name in ((GIB, "GiB"), (2**20, "MiB"), (1024, "KiB")):
        if abs(value) >= size or (size == GIB and abs(value) >= 0.1 * GIB):
            return f"{value / size:,.2f} {name}" if size > 1024 else f"{value / size:,.4g} {name}"
    return f"{value:,.0f} B"


def _parts(held: RankWeights) -> str:
    named = {
        "attention": held.attention, "feed-forward": held.mlp, "experts": held.experts,
        "embedding and head": held.embedding + held.head, "others": held.others,
    }  # fmt: skip
    size, unit = (GIB, "GiB") if held.total >= GIB else (2**20, "MiB")
    return (
        ", ".join(f"{name} {value / size:,.2f}" for name, value in named.items() if value >= 0.005 * size) + f" {unit}"
    )
