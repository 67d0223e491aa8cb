"""Reads the weights of a Hugging Face checkpoint folder: safetensors, whole or in shards."""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine.token.checkpoint import ModelError, read_json
from engine.token.models.settings import section


def iterate_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the checkpoint with its name, one at a time. Raises ModelError for an absent or broken file."""
    index = section(read_json(folder, "model.safetensors.index.json"), "weight_map")
    names = sorted({str(name) for name in index.values()}) or sorted(p.name for p in folder.glob("*.safetensors"))
    if not names:
        raise ModelError(f"{folder} holds no *.safetensors weights; download the whole checkpoint, or convert it")
    for name in names:
        if Path(name).name != name:
            raise ModelError(f"the index of {folder} names the shard {name!r}, which is not a file of that folder")
        if not (folder / name).is_file():
            raise ModelError(f"{folder} lacks {name}, which its index names; the download is incomplete")
        try:
            # The library checks that the header's offsets lie within the file and do not overlap.
            with safe_open(folder / name, framework="pt") as file:
                for key in sorted(file.keys()):
                    yield key, file.get_tensor(key)
        except SafetensorError as error:
            raise ModelError(f"{folder / name} is damaged or not complete: {error}; download it again") from None
