"""vLLM's configuration under the names that Sojourn gives settings, and the sizes of the model. No text, no paths."""

import sys
from pathlib import PurePath
from typing import Any

from sojourn_probe.records import Setting

# Our name → the section of vLLM's configuration, and its name there.
_SETTINGS = {
    "max_num_seqs": ("scheduler_config", "max_num_seqs"),
    "max_num_batched_tokens": ("scheduler_config", "max_num_batched_tokens"),
    "long_prefill_token_threshold": ("scheduler_config", "long_prefill_token_threshold"),
    "chunked_prefill": ("scheduler_config", "enable_chunked_prefill"),
    "policy": ("scheduler_config", "policy"),
    "async_scheduling": ("scheduler_config", "async_scheduling"),
    "block_size": ("cache_config", "block_size"),
    "num_kv_blocks": ("cache_config", "num_gpu_blocks"),
    "prefix_caching": ("cache_config", "enable_prefix_caching"),
    "max_model_len": ("model_config", "max_model_len"),
    "dtype": ("model_config", "dtype"),
    "enforce_eager": ("model_config", "enforce_eager"),
    "quantization": ("model_config", "quantization"),
    "tensor_parallel_size": ("parallel_config", "tensor_parallel_size"),
    "pipeline_parallel_size": ("parallel_config", "pipeline_parallel_size"),
    "data_parallel_size": ("parallel_config", "data_parallel_size"),
    "speculative_method": ("speculative_config", "method"),
    "speculative_tokens": ("speculative_config", "num_speculative_tokens"),
    "device": ("device_config", "device_type"),
}
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "sliding_window", "tie_word_embeddings", "kv_lora_rank", "num_experts",
    "num_local_experts", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "model_type",
)  # fmt: skip


def settings_of(config: Any) -> dict[str, Setting]:
    found = {name: _plain(_at(config, *path)) for name, path in _SETTINGS.items()}
    model = _at(config, "model_config", "model")
    if isinstance(model, str):
        found["model"] = PurePath(model).name
    if found.get("device") == "cpu" and (torch := sys.modules.get("torch")) is not None:
        found["threads"] = torch.get_num_threads()
    return {name: value for name, value in found.items() if value is not None}


def shape_of(config: Any) -> dict[str, Setting]:
    text = _at(config, "model_config", "hf_text_config")
    found = {name: _plain(getattr(text, name, None)) for name in _SIZES}
    dtype, kept = _at(config, "model_config", "dtype"), _at(config, "cache_config", "cache_dtype")
    found["weight_bytes_each"] = getattr(dtype, "itemsize", None)
    found["kv_bytes_each"] = 1 if isinstance(kept, str) and kept.startswith("fp8") else found["weight_bytes_each"]
    return {name: value for name, value in found.items() if value is not None}


def _at(config: Any, section: str, name: str) -> Any:
    return getattr(getattr(config, section, None), name, None)


def _plain(value: Any) -> Setting:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(getattr(value, "value", value)).removeprefix("torch.")
