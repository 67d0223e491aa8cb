"""Where a model's weights come from: a checkpoint folder, or a GGUF file."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from sojourn.engine.compute.quantisation.matrix import QuantisedMatrix, Stored
from sojourn.engine.token.gguf.file import gguf_path
from sojourn.engine.token.gguf.tensors import GGUFWeights
from sojourn.engine.token.models.layer import Translate
from sojourn.engine.token.models.weight_file import FileTensor
from sojourn.engine.token.models.weights import TensorFiles, iterate_weights, outlined_weights, streamed_weights
from sojourn.engine.token.quantised.registry import weight_scheme
from sojourn.metrics.compute.startup import StartupClock


class WeightSource(Protocol):
    """The tensors of one model, under the names of a Hugging Face checkpoint. All raise ModelError."""

    name: str | None  # of the format; None where nothing is quantised

    def outlined(self) -> Iterator[tuple[str, Stored]]:
        """All, of the meta device, from the headers alone."""
        ...

    def weights(self, load_format: str, startup: StartupClock) -> Iterator[tuple[str, Stored | FileTensor]]:
        """`load_format` as EngineConfig has it. The clock learns which bytes came from where."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """A tensor that is not quantised, whole."""
        ...

    def outline(self, module: str, outputs: int, inputs: int) -> QuantisedMatrix | None:
        """The form of one layer's matrix, without a file of weights if config.json says it; None: it is dense."""
        ...


class FolderWeights:
    """safetensors, quantised as config.json says."""

    def __init__(self, folder: Path, config: dict[str, Any]):
        self._folder, self._scheme = folder, weight_scheme(config)
        self.name = None if self._scheme is None else self._scheme.name

    def outlined(self) -> Iterator[tuple[str, Stored]]:
        return outlined_weights(self._folder, self._scheme)

    def weights(self, load_format: str, startup: StartupClock) -> Iterator[tuple[str, Stored | FileTensor]]:
        if load_format == "safetensors-mmap":
            return iterate_weights(self._folder, self._scheme)
        return streamed_weights(self._folder, self._scheme, startup)

    def read(self, name: str) -> torch.Tensor:
        return TensorFiles(self._folder).read(name)

    def outline(self, module: str, outputs: int, inputs: int) -> QuantisedMatrix | None:
        return None if self._scheme is None else self._scheme.outline(module, outputs, inputs)


def weight_source(folder: Path, config: dict[str, Any]) -> WeightSource:
    path = gguf_path(folder)
    return FolderWeights(folder, config) if path is None else GGUFWeights(path, config)


def has_own_head(source: WeightSource, translate: Translate) -> bool:
    """Whether the files hold a head that is not the embedding: a fine-tune's, whose config.json calls them one."""
    found = {ours: (name, tensor) for name, stored in source.outlined() for ours, tensor in translate(name, stored)
             if ours in ("lm_head.weight", "model.embed_tokens.weight")}  # fmt: skip
    if "lm_head.weight" not in found:
        return False
    names, stored = zip(*found.values(), strict=True)
    if len(found) < 2 or any(isinstance(matrix, QuantisedMatrix) for matrix in stored):
        return True
    return stored[0].shape != stored[1].shape or not torch.equal(*map(source.read, names))
