"""Reads the weights of a Hugging Face checkpoint folder: safetensors, whole or in shards."""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine.token.checkpoint import ModelError, read_json


def iterate_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the checkpoint with its name, one at a time. Raises ModelError for an absent or broken file."""
    index = read_json(folder, "model.safetensors.index.json")
    names = sorted(set(index.get("weight_map", {}).values())) or sorted(p.name for p in folder.glob("*.safetensors"))
    if not names:
        raise ModelError(f"{folder} holds no *.safetensors weights; download the whole checkpoint, or convert it")
    for name in names:
        if not (folder / name).is_file():
            raise ModelError(f"{folder} lacks {name}, which its index names; the download is incomplete")
        try:
            with safe_open(folder / name, framework="pt") as file:
                for key in sorted(file.keys()):
                    yield key, file.get_tensor(key)
        except SafetensorError as error:
            raise ModelError(f"{folder / name} is damaged: {error}") from None
