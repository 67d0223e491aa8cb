"""Which family reads which architecture. A new dense family is one short file and one line here."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine.token.checkpoint import ModelError, read_config
from engine.token.models import llama, qwen3
from engine.token.models.dense import DenseConfig, DenseDecoder
from engine.token.models.weights import iterate_weights

FAMILIES: dict[str, Callable[[dict[str, Any]], DenseConfig]] = {
    "LlamaForCausalLM": llama.dense_config,
    "Qwen3ForCausalLM": qwen3.dense_config,
}


def load_model(folder: Path, dtype: torch.dtype, device: torch.device, max_model_len: int | None) -> DenseDecoder:
    """Builds the model of a checkpoint folder and fills it. Raises ModelError with a sentence."""
    config = read_config(folder)
    architecture = config["architectures"][0]
    if architecture not in FAMILIES:
        raise ModelError(f"architecture {architecture} is not supported; supported are {', '.join(FAMILIES)}")
    if config.get("quantization_config"):
        raise ModelError("quantised checkpoints are not supported yet; use the float16, bfloat16 or float32 one")
    dense = FAMILIES[architecture](config)
    limit = max_model_len or dense.max_model_len
    if limit > dense.max_model_len:
        raise ModelError(f"max_model_len {limit} is above the model's own limit {dense.max_model_len}; lower it")
    with torch.device("meta"):
        model = DenseDecoder(dense)
    model = model.to(dtype).to_empty(device=device).requires_grad_(False)
    if dense.tie_embeddings:
        model.head = model.embedding  # to_empty gave each its own memory
    with torch.no_grad():
        model.load(iterate_weights(folder))
    model.make_rope(limit, device)
    return model.eval()
