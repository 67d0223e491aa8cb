"""A model's config.json: how many bytes of KV a token takes, and so how many tokens and contexts a GiB holds.

Shapes whose layers cannot be told apart give no figure. Weights of fewer bits do not change the KV cache's numbers.
"""

from collections.abc import Mapping
from typing import Any

from sojourn.interop.held.given import Given
from sojourn.interop.held.held import Held, Setting
from sojourn.metrics.compute.config_layers import layers_of, number

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
GIB = 2**30
UNKNOWN = "KV bytes of a token: {}"
WHAT_IT_LACKS = "load, latencies and the KV pool's size: give the server's log or a page of its /metrics"


def recognises(given: Given) -> bool:
    found = given.document
    return (
        isinstance(found, dict)
        and ("model_type" in found or "architectures" in found)
        and bool({"hidden_size", "n_embd", "text_config", "num_hidden_layers", "d_model"} & found.keys())
    )


def read(given: Given) -> list[Held]:
    whole = given.document
    text = whole.get("text_config") if isinstance(whole.get("text_config"), dict) else whole
    config = {**{name: value for name, value in whole.items() if name in ("torch_dtype", "dtype")}, **text}
    architectures = whole.get("architectures")
    settings: dict[str, Setting] = {"model_type": str(whole.get("model_type", "unknown"))}
    if isinstance(architectures, list) and architectures:
        settings["architecture"] = str(architectures[0])
    context = number(config, "max_position_embeddings", "n_positions", "max_seq_len")
    if context:
        settings["max_position_embeddings"] = context
    notes, missing = [], [WHAT_IT_LACKS]
    try:
        settings |= kv_of(config)
        notes = list(_sentences(settings, context))
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        missing.insert(0, UNKNOWN.format(str(error).strip("'\"") or "its fields are not known here"))
    return [Held(kind="model configuration", name=given.name, settings=settings, notes=notes, missing=missing)]


def kv_of(config: Mapping[str, Any]) -> dict[str, Setting]:
    """`kv_bytes_per_token`, and `kv_bytes_of_windows`, which a request takes at most beside it. Raises ValueError where
    the shape says neither."""
    count = number(config, "num_hidden_layers", "n_layer", "num_layers")
    if not count:
        raise ValueError("the number of layers is not in it")
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "").removeprefix("torch.")
    if dtype not in BYTES:
        raise ValueError(f"its dtype is {dtype or 'not stated'}")
    kinds = layers_of(config, count)
    full, windows, states = (kinds.count(kind) for kind in ("full", "window", "state"))
    if number(config, "kv_lora_rank"):
        of_layer = (number(config, "kv_lora_rank") + number(config, "qk_rope_head_dim")) * BYTES[dtype]
    else:
        heads = number(config, "num_attention_heads", "n_head")
        head_dim = number(config, "head_dim") or number(config, "hidden_size", "n_embd") // heads
        if not head_dim:
            raise ValueError("the size of its heads is not in it")
        kv_heads = number(config, "num_key_value_heads", "num_kv_heads") or (1 if config.get("multi_query") else heads)
        of_layer = 2 * kv_heads * head_dim * BYTES[dtype]
    found: dict[str, Setting] = {"kv_dtype": dtype, "kv_bytes_per_token": full * of_layer}
    if windows:
        window = number(config, "sliding_window", "attention_chunk_size")
        if not window:
            raise ValueError("the size of its sliding window is not in it")
        found["kv_bytes_of_windows"] = windows * of_layer * window
        found["sliding_window"] = window
    if states:
        found["layers_with_a_state"] = states
    return found


def _sentences(settings: Mapping[str, Setting], context: int):
    each, windows = int(settings["kv_bytes_per_token"]), int(settings.get("kv_bytes_of_windows", 0))
    of = f" in {settings['kv_dtype']}"
    if each:
        yield f"a token takes {each:,} bytes of KV{of}: 1 GiB holds {GIB // each:,} tokens"
    if windows:
        yield f"its sliding windows take at most {windows / GIB:.3g} GiB more for each request"
    if settings.get("layers_with_a_state"):
        yield f"{settings['layers_with_a_state']} layers keep a state of fixed size for each request beside it"
    if context and each:
        yield f"a request of {context:,} tokens takes {(each * context + windows) / GIB:.3g} GiB of KV{of}"
