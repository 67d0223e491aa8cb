"""How the tensors of a checkpoint get into a decoder: by name, as views, and only what the rank holds."""

import re
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from sojourn.engine.compute.cuts import Cuts
from sojourn.engine.compute.linear import Linear
from sojourn.engine.compute.quantisation.matrix import QuantisedMatrix, Stored
from sojourn.engine.compute.quantisation.parts import storage_of
from sojourn.engine.compute.weight_formats import WeightFormat
from sojourn.engine.token.models.decoder import Decoder
from sojourn.engine.token.models.filling import Filling
from sojourn.engine.token.models.moe import MixtureOfExperts
from sojourn.engine.token.models.weight_file import FileTensor
from sojourn.metrics.errors import ModelError

Owners = dict[int, Linear | MixtureOfExperts]


def fill(model: Decoder, weights: Iterable[tuple[str, Stored | FileTensor]], packs: WeightFormat | None = None) -> None:
    """Fills every parameter. Raises ModelError for a tensor that is missing, unknown or of another shape.

    With `packs` a matrix is packed once it is filled.

    A quantised matrix goes to its layer where the weight is of the meta device: on an outline all are, and once
    `choose_kernels` was called those that stay quantised. Elsewhere it is dequantised. Of the tensors that other ranks
    hold, nothing is read.
    """
    missing, cuts = model.slices(), model.cuts()
    owners, filling = _owners(model), Filling(model.matrices(), missing.values(), packs)
    left_out = sum(part.numel() for module in model.matrices() for part in module.matrices()
                   if not isinstance(part, nn.Parameter))  # fmt: skip
    filled = sum(t.numel() for t in missing.values())
    touched: set[Linear | MixtureOfExperts] = set()
    assert filled == sum(p.numel() for p in model.parameters()) + left_out - model.own_head, "all are filled"
    for stored_name, name, tensor, file in _translated(model, weights):
        target = missing.pop(name, None)
        if target is None and (_is_elsewhere(model, name, cuts) or _is_empty_bias(name, tensor)):
            continue
        if target is None:
            raise ModelError(
                f"tensor {stored_name} has no place in this architecture; is config.json of another model?"
            )
        _check(stored_name, tensor, cuts, name, target)
        if (cut := cuts.get(name)) is not None:
            tensor = cut.of(stored_name, tensor)
        if isinstance(tensor, QuantisedMatrix):
            tensor.check(stored_name)
            touched |= _place(model, target, tensor, owners)
        elif cut is not None and not cut.is_added:
            target.zero_()
        elif file is not None:
            file.fill(target, tensor)
        else:
            target.copy_(tensor)
        filling.filled(target)
        touched -= {module for module in touched if _finish(module, missing)}
    if filling.has_packed:
        model.packed_format = packs.name
    if missing:
        raise ModelError(f"weights lack {len(missing)} tensors, among them {sorted(missing)[0]}")


def place_quantised(model: Decoder, make: Callable[[str, int, int], QuantisedMatrix | None]) -> None:
    """Hands each matrix without memory a source of (module, outputs, inputs), as a checkpoint names them; None leaves
    one dense. On an outline those are all matrices."""
    owners = _owners(model)
    for name, target in model.slices().items():
        owner = owners.get(storage_of(target))
        if owner is None or (model.embedding is not None and storage_of(target) == storage_of(model.embedding)):
            continue
        if (matrix := make(name.removesuffix(".weight"), *target.shape)) is not None:
            owner.place(target, matrix)
            _finish(owner, {})


def _translated(
    model: Decoder, weights: Iterable[tuple[str, Stored | FileTensor]]
) -> Iterator[tuple[str, str, Stored, FileTensor | None]]:
    """Each tensor with its stored name and the one of our parts; of one in a file its outline, and where it lies."""
    for stored_name, stored in weights:
        if stored_name.endswith("rotary_emb.inv_freq"):
            continue  # old checkpoints store what config.json says
        file = stored if isinstance(stored, FileTensor) else None
        for name, tensor in model.config.translate(stored_name, stored if file is None else file.outline):
            if name != "lm_head.weight" or not model.config.tie_embeddings:
                yield stored_name, name, tensor, file


def _is_elsewhere(model: Decoder, name: str, cuts: Cuts) -> bool:
    """Whether another rank holds the tensor."""
    if cuts.get(name, name) is None:
        return True
    if model.layout.pipeline_parallel == 1 or (layer := re.match(r"model\.layers\.(\d+)\.", name)) is None:
        return False
    first = model.first_layer
    return int(layer[1]) < model.num_all_layers and not first <= int(layer[1]) < first + len(model.layers)


def _is_empty_bias(name: str, tensor: Stored) -> bool:
    """Quantisers wrote one for every layer."""
    return name.endswith(".bias") and not tensor.is_meta and not tensor.any()


def _check(stored_name: str, tensor: Stored, cuts: Cuts, name: str, target: torch.Tensor) -> None:
    dense = isinstance(tensor, torch.Tensor)
    if dense and (not tensor.is_floating_point() or tensor.element_size() == 1):
        raise ModelError(f"tensor {stored_name} is {tensor.dtype}; only 16 and 32 bit floats are supported")
    cut = cuts.get(name)
    expected = list(target.shape) if cut is None else cut.whole_shape(target.shape)
    if expected != list(tensor.shape):
        raise ModelError(f"tensor {stored_name} has shape {list(tensor.shape)}, expected {expected}")


def _owners(model: Decoder) -> Owners:
    """Storage of a weight without memory → its layer."""
    return {storage_of(part): module for module in model.matrices() for part in module.matrices() if part.is_meta}


def _place(
    model: Decoder, target: torch.Tensor, matrix: QuantisedMatrix, owners: Owners
) -> set[Linear | MixtureOfExperts]:
    """Hands a source to the layers that hold it quantised, and returns them."""
    taken = set()
    is_embedding = model.embedding is not None and storage_of(target) == storage_of(model.embedding)
    if (owner := owners.get(storage_of(target))) is not None:
        owner.place(target, matrix)
        taken.add(owner)
    if is_embedding and model.own_head:
        model.head.place(model.head.weight, matrix)
        taken.add(model.head)
    if owner is None or is_embedding:
        target.copy_(matrix.dequantised())
    return taken


def _finish(module: Linear | MixtureOfExperts, missing: dict[str, torch.Tensor]) -> bool:
    """Makes the layer's method once its sources and biases have come: codes need not wait for other layers."""
    if not module.placed:
        return False
    biases = {storage_of(bias) for bias in module.biases()}
    if biases and biases & {storage_of(target) for target in missing.values()}:
        return False
    module.finish()
    return True
