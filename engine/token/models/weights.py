"""The weights of a model: those of a Hugging Face checkpoint folder (safetensors, whole or in shards), or random."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from engine.token.checkpoint import read_json
from engine.token.models.settings import section
from metrics.errors import ModelError

HEADER_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}
# Those that a model may be loaded from, and those that are refused by the name of the tensor.
DTYPES = HEADER_DTYPES | {"F32": torch.float32, "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn,
                          "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16,
                          "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}  # fmt: skip
STANDARD_DEVIATION = 0.02  # of trained models' initial weights; with norms in every layer, activations stay near one
SEED = 0


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


def outlined_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """As `iterate_weights`, from the headers alone: tensors of the meta device, which have a shape and a dtype."""
    for name in _shards(folder):
        with _opened(folder / name) as file:
            for key in sorted(file.keys()):
                part = file.get_slice(key)
                stored = part.get_dtype()
                if stored not in DTYPES:
                    raise ModelError(f"tensor {key} is {stored}; only 16 and 32 bit floats are supported")
                yield key, torch.empty(part.get_shape(), dtype=DTYPES[stored], device="meta")


@torch.no_grad()
def fill_with_random_weights(model: nn.Module) -> None:
    """Fills every parameter where it lies, in its own dtype: matrices at random, norms with ones, biases with zeros.

    Benchmarks need the sizes of a checkpoint, not its contents. The same device and shape give the same weights; a CPU
    and a GPU have different generators.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(SEED)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            parameter.normal_(0.0, STANDARD_DEVIATION, generator=generator)
        else:
            parameter.fill_(0.0 if "bias" in name else 1.0)


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
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is damaged or not complete: {error}; download it again") from None
