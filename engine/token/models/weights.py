"""The weights of a model: those of a Hugging Face checkpoint folder (safetensors, whole or in shards), or random."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from sojourn.engine.compute.quantisation.matrix import QuantisedMatrix, Stored
from sojourn.engine.token.checkpoint import read_json
from sojourn.engine.token.models.settings import section
from sojourn.engine.token.models.weight_file import FileTensor, WeightFile, tensor_places
from sojourn.engine.token.quantised.scheme import SMALL, WeightScheme, gathered
from sojourn.metrics.compute.startup import StartupClock
from sojourn.metrics.errors import ModelError

HEADER_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}
# Those that a model may be loaded from, and those that are refused by the name of the tensor.
DTYPES = HEADER_DTYPES | {"F32": torch.float32, "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn,
                          "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16,
                          "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}  # fmt: skip
STANDARD_DEVIATION = 0.02  # of trained models' initial weights; with norms in every layer, activations stay near one
SEED = 0


class TensorFiles:
    """The tensors of a checkpoint folder by name: whole, or as outlines from the headers alone.

    Raises ModelError for an absent or broken file, also while it reads.
    """

    def __init__(self, folder: Path):
        self._files = {folder / name: _open(folder / name) for name in _shards(folder)}
        self._path_of: dict[str, Path] = {}
        self._streamed: dict[Path, tuple[WeightFile, dict[str, int]]] = {}
        for path, file in self._files.items():
            with _reading(path):
                self._path_of |= dict.fromkeys(sorted(file.keys()), path)

    @property
    def names(self) -> list[str]:
        return list(self._path_of)

    def stored(self, name: str, startup: StartupClock) -> FileTensor:
        """A tensor that is read later, straight to where it belongs."""
        path = self._path_of[name]
        with _reading(path):
            if path not in self._streamed:
                self._streamed[path] = WeightFile(path, startup), tensor_places(path)
            file, places = self._streamed[path]
        return FileTensor(file, places[name], self.outline(name))

    def read(self, name: str) -> torch.Tensor:
        path = self._path_of[name]
        with _reading(path):
            return self._files[path].get_tensor(name)

    def outline(self, name: str) -> torch.Tensor:
        """A tensor of the meta device, which has a shape and a dtype."""
        path = self._path_of[name]
        with _reading(path):
            part = self._files[path].get_slice(name)
            stored, shape = part.get_dtype(), part.get_shape()
        if stored not in DTYPES:
            raise ModelError(f"tensor {name} is {stored}; only 16 and 32 bit floats are supported")
        return torch.empty(shape, dtype=DTYPES[stored], device="meta")


def stored_dtype(folder: Path) -> torch.dtype:
    """The dtype of all the checkpoint's matrices; float32 where they differ. Raises as `TensorFiles`."""
    files = TensorFiles(folder)
    outlines = map(files.outline, files.names)
    dtypes = {outline.dtype for outline in outlines if outline.dim() > 1}
    one = dtypes.pop() if len(dtypes) == 1 else None
    return one if one in HEADER_DTYPES.values() else torch.float32


def iterate_weights(folder: Path, scheme: WeightScheme | None = None) -> Iterator[tuple[str, Stored]]:
    """Every tensor of the checkpoint with its name, one at a time; those of a quantised module as one matrix."""
    files = TensorFiles(folder)
    return _named(files, files.read, scheme)


def streamed_weights(
    folder: Path, scheme: WeightScheme | None, startup: StartupClock
) -> Iterator[tuple[str, Stored | FileTensor]]:
    """As `iterate_weights`, in the order of the files, without a map of them. What is not quantised is read when it is
    put in its place."""
    files = TensorFiles(folder)
    if scheme is None:
        return ((name, files.stored(name, startup)) for name in files.names)
    return gathered(scheme, files.names, lambda name: files.stored(name, startup).read())


def outlined_weights(folder: Path, scheme: WeightScheme | None = None) -> Iterator[tuple[str, Stored]]:
    """As `iterate_weights`, from the headers alone: tensors of the meta device."""
    files = TensorFiles(folder)

    def outline(name: str) -> torch.Tensor:
        return files.read(name) if scheme is not None and name.endswith(SMALL) else files.outline(name)

    return _named(files, outline, scheme)


def _named(
    files: TensorFiles, read: Callable[[str], torch.Tensor], scheme: WeightScheme | None
) -> Iterator[tuple[str, Stored]]:
    return ((name, read(name)) for name in files.names) if scheme is None else gathered(scheme, files.names, read)


@torch.no_grad()
def fill_with_random_weights(model: nn.Module, *, alike: bool = False) -> None:
    """Fills every parameter where it lies, in its own dtype: matrices at random, norms with ones, biases with zeros.

    Benchmarks need the sizes of a checkpoint, not its contents. The same device and shape give the same weights; a CPU
    and a GPU have different generators. With `alike` a parameter's numbers depend on its place alone: ranks that hold
    the same router must agree, also where the last one has a smaller vocabulary.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(SEED)
    for place, (name, parameter) in enumerate(model.named_parameters()):
        if alike:
            generator.manual_seed(SEED + place)
        if parameter.dim() >= 2:
            parameter.normal_(0.0, STANDARD_DEVIATION, generator=generator)
        else:
            parameter.fill_(0.0 if "bias" in name else 1.0)


def random_matrix(outline: QuantisedMatrix, generator: torch.Generator) -> QuantisedMatrix:
    """A matrix of the outline's form with random codes, and scales that spread its weights as those of others."""
    size, low = outline.shape, 0 if outline.codes.dtype == torch.uint8 else -(1 << outline.bits - 1)
    if outline.codes.dtype == torch.float8_e4m3fn:
        numbers = torch.randn(size, generator=generator)
        codes = numbers.round().clamp(-6, 6).to(outline.codes.dtype)  # e2m1 has 1 to 4 and 6
        codes = torch.where(codes.float().abs() == 5, 4.0, codes.float()).to(outline.codes.dtype)
    else:
        codes = torch.randint(low, low + (1 << outline.bits), size, generator=generator).to(outline.codes.dtype)
    middle = (1 << outline.bits - 1) if low == 0 else 0
    spread = max((codes.float() - middle).std().item(), 1e-3) if codes.numel() > 1 else 1.0
    scales = torch.full(outline.scales.shape, STANDARD_DEVIATION / spread).half().float()  # as checkpoints hold them
    zeros = outline.zeros
    if zeros is not None:  # of several values: a kernel may hold a single one apart
        zeros = torch.randint(middle - 1, middle + 2, zeros.shape, generator=generator).float()
    fixed = None if outline.activation_scale is None else torch.tensor(1.0)
    return replace(outline, codes=codes, scales=scales, zeros=zeros, activation_scale=fixed)


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


def _open(path: Path) -> Any:
    with _reading(path):
        return safe_open(path, framework="pt")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        # The library checks that the header's offsets lie within the file and do not overlap.
        yield
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is damaged or not complete: {error}; download it again") from None
