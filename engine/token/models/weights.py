"""Reads the weights of a Hugging Face checkpoint folder: safetensors, whole or in shards."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.token.checkpoint import read_json
from engine.token.models.settings import section
from metrics.errors import ModelError

HEADER_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}


def stored_dtype(folder: Path) -> torch.dtype:
    """The dtype of all the checkpoint's matrices; float32 where they differ. Raises as `iterate_weights`."""
    dtypes = set()
    for name in _shards(folder):
        with _opened(folder / name) as file:
            parts = map(file.get_slice, file.keys())
            dtypes |= {part.get_dtype() for part in parts if len(part.get_shape()) > 1}
    return HEADER_DTYPES.get(dtypes.pop(), torch.float32) if len(dtypes) == 1 else torch.float32


def iterate_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the checkpoint with its name, one at a time. Raises ModelError for an absent or broken file."""
    for name in _shards(folder):
        with _opened(folder / name) as file:
            for key in sorted(file.keys()):
                yield key, file.get_tensor(key)


def _shards(folder: Path) -> list[str]:
    """Names of the files that hold the weights. Raises ModelError where one is absent."""
    index = section(read_json(folder, "model.safetensors.index.json"), "weight_map")
    names = sorted({str(name) for name in index.values()}) or sorted(p.name for p in folder.glob("*.safetensors"))
    if not names:
        raise ModelError(f"{folder} holds no *.safetensors weights; download the whole checkpoint, or convert it")
    for name in names:
        if Path(name).name != name:
            raise ModelError(f"the index of {folder} names the shard {name!r}, which is not a file of that folder")
        if not (folder / name).is_file():
            raise ModelError(f"{folder} lacks {name}, which its index names; the download is incomplete")
    return names


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        # The library checks that the header's offsets lie within the file and do not overlap.
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ModelError(f"{path} is damaged or not complete: {error}; download it again") from None
