"""An adapter on its base model: which linear layers of ours its modules belong to, and its weights for them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from sojourn.engine.compute.linear import Linear, LinearPart
from sojourn.engine.techniques.lora.checkpoint.checkpoint import (
    WEIGHTS,
    AdapterDescription,
    AdapterError,
    AdapterModule,
    matrix_of,
)
from sojourn.engine.techniques.lora.kernels.backend import AdaptedLinear, AdapterParts, LoraPart
from sojourn.engine.token.models.decoder import Decoder
from sojourn.engine.token.models.layer import Translate


@dataclass(frozen=True, slots=True)
class FittedPart:
    """Rows of a module's B, and columns of its A, behind a part of a linear layer's outputs."""

    layer: int  # index among the adapted linear layers
    begin: int
    rows: slice
    columns: slice


class AdaptedModel:
    """The linear layers of a decoder that adapters may change. Keeps no weights: an outline serves as well.

    A rank of a parallel group has its part of an adapter: of B where a layer's outputs are divided, and of A where its
    inputs are. So the sum over ranks holds the deltas, too. An adapter is compared with the whole model.
    """

    def __init__(self, model: Decoder):
        self._parts: Mapping[str, LinearPart] = model.parts()
        self._whole: Mapping[str, LinearPart] = self._parts if model.layout.size == 1 else _outline(model).parts()
        self._translate: Translate = model.config.translate
        self.linears: Sequence[Linear] = list(dict.fromkeys(part.linear for part in self._parts.values()))
        self._index = {linear: index for index, linear in enumerate(self.linears)}

    @property
    def layers(self) -> list[AdaptedLinear]:
        """In the order of their indices."""
        begins: list[list[int]] = [[] for _ in self.linears]
        for part in self._parts.values():
            begins[self._index[part.linear]].append(part.begin)
        sizes = zip(self.linears, begins, strict=True)
        return [AdaptedLinear(linear.in_features, linear.out_features, tuple(sorted(b))) for linear, b in sizes]

    def fitted(self, description: AdapterDescription) -> dict[str, list[FittedPart]]:
        """Module → where its outputs go. Raises AdapterError for an adapter of another model."""
        return {module.name: list(self._fit(module)) for module in description.modules}

    def read(self, description: AdapterDescription) -> AdapterParts:
        """The adapter's weights by linear layer. Raises AdapterError."""
        fitted, scales = self.fitted(description), {module.name: module.scale for module in description.modules}
        stored: dict[str, dict[str, torch.Tensor]] = {}
        for key, tensor in _tensors(description.folder / WEIGHTS).items():
            module, side = matrix_of(key)
            stored.setdefault(module, {})[side] = tensor
        parts: AdapterParts = {}
        for module, places in fitted.items():
            a, b = stored[module]["A"], stored[module]["B"]
            for place in places:
                part = LoraPart(place.begin, a[:, place.columns], b[place.rows], scales[module])
                parts.setdefault(place.layer, []).append(part)
        return {layer: sorted(found, key=lambda part: part.begin) for layer, found in parts.items()}

    def _fit(self, module: AdapterModule) -> Iterator[FittedPart]:
        outline = torch.empty((module.out_features, module.in_features), device="meta")
        row = 0
        for name, rows in self._translate(f"{module.name}.weight", outline):
            whole = self._whole.get(name.removesuffix(".weight"))
            if whole is None:
                raise AdapterError(
                    f"the adapter changes {module.name}, which is no linear layer of this model that can be adapted; "
                    "embeddings, heads, routers, experts and kv_b_proj cannot"
                )
            expected = (whole.out_features, whole.linear.in_features)
            if tuple(rows.shape) != expected:
                raise AdapterError(
                    f"the matrices of {module.name} change {list(rows.shape)} weights, and this model has "
                    f"{list(expected)} there; the adapter is of another model"
                )
            if (part := self._parts.get(name.removesuffix(".weight"))) is not None:  # not another stage's
                yield self._of_rank(part, slice(row, row + len(rows)))
            row += len(rows)

    def _of_rank(self, part: LinearPart, rows: slice) -> FittedPart:
        cut, columns = part.cut, slice(None)
        if cut is not None and cut.dim == 0:
            rows = slice(rows.start + cut.begin, rows.start + cut.end)
        elif cut is not None:
            columns = slice(cut.begin, cut.end)
        return FittedPart(self._index[part.linear], part.begin, rows, columns)


def _outline(model: Decoder) -> Decoder:
    """The model of which a rank holds a part."""
    with torch.device("meta"):
        return Decoder(model.whole_config)


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{path} is damaged or not complete: {error}; download it again") from None
