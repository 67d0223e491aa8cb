"""A GGUF file: which one a `model` setting means, its metadata and its tensors."""

import re
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sojourn.metrics.errors import ModelError
from sojourn.metrics.installed import say_missing

_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


class GGUFTensor(NamedTuple):
    name: str
    kind: str  # of ggml, such as Q4_K
    shape: tuple[int, ...]  # of the weights, outputs first
    data: np.ndarray  # rows of blocks, uint8, or numbers; mapped, not read


class GGUFFile(NamedTuple):
    path: Path
    metadata: dict[str, Any]
    tensors: tuple[GGUFTensor, ...]


def gguf_path(folder: Path) -> Path | None:
    """The GGUF file that a model path means: the file itself, or the only one of a folder without other weights."""
    if folder.suffix == ".gguf":
        return folder if folder.is_file() else None
    if not folder.is_dir() or any(folder.glob("*.safetensors")):
        return None
    found = sorted(folder.glob("*.gguf"))
    if len(found) > 1:
        raise ModelError(f"{folder} has {len(found)} GGUF files; give the path of the one that you mean")
    return found[0] if found else None


def opened(path: Path) -> GGUFFile:
    """Raises ModelError for a file that is damaged, or of several parts."""
    try:
        status = path.stat()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    return _opened(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=2)
def _opened(path: Path, size: int, changed_ns: int) -> GGUFFile:
    if _SPLIT.search(path.name):
        raise ModelError(f"{path} is a part of a split model; join the parts with `llama-gguf-split --merge`")
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ModelError(say_missing(["gguf"], "a GGUF file")) from None
    try:
        # The reader keeps an object for each entry of the vocabulary, so it goes when the values are taken out.
        reader = GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        tensors = tuple(_tensor(tensor) for tensor in reader.tensors)
    except (ValueError, IndexError, KeyError, OverflowError, TypeError, MemoryError, OSError) as error:
        raise ModelError(f"{path} is damaged or not complete: {error or type(error).__name__}; get it again") from None
    return GGUFFile(path, metadata, tensors)


def _tensor(tensor: Any) -> GGUFTensor:
    shape = tuple(int(size) for size in reversed(tensor.shape))
    return GGUFTensor(tensor.name, tensor.tensor_type.name, shape, tensor.data)
