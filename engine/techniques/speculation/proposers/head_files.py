"""Heads that draft from the target's hidden states: how their modules are outlined, filled and packed."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sojourn.engine.compute.linear import Linear
from sojourn.engine.compute.weight_formats import WeightFormat, weight_format
from sojourn.engine.token.checkpoint import read_json
from sojourn.engine.token.models.moe import MixtureOfExperts
from sojourn.engine.token.models.weights import outlined_weights, stored_dtype
from sojourn.metrics.errors import ModelError

# (name and tensor of the checkpoint) → the same under the names of a head's slices; nothing for what is not used
Translate = Callable[[str, torch.Tensor], Iterable[tuple[str, torch.Tensor]]]


class HeadFiles:
    """A folder with config.json and safetensors. Raises ModelError where one of them is absent or damaged."""

    def __init__(self, folder: Path):
        if not folder.is_dir():
            raise ModelError(f"speculation_model {folder} does not exist; give the folder of what drafts")
        self.folder = folder
        self.config: dict[str, Any] = read_json(folder, "config.json")
        if not self.config:
            raise ModelError(f"speculation_model {folder} has no config.json; download the whole folder")

    @cached_property
    def outlines(self) -> dict[str, torch.Tensor]:
        """Name → tensor of the meta device."""
        return dict(outlined_weights(self.folder))

    @property
    def names(self) -> Iterable[str]:
        return self.outlines.keys()


@contextmanager
def outlining(dtype: torch.dtype) -> Iterator[None]:
    """Modules that are made here take no memory, and have this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


def filled(head: nn.Module, weights: Iterable[tuple[str, torch.Tensor]], translate: Translate, source: Path) -> None:
    """Fills every weight of a head, or on the meta device only checks. Raises ModelError for a tensor that is missing,
    unknown or of another shape."""
    missing = head.slices()
    with torch.no_grad():
        for stored, whole in weights:
            for name, tensor in translate(stored, whole):
                target = missing.pop(name, None)
                if target is None:
                    raise ModelError(f"tensor {stored} of {source} has no place in what drafts here; is its "
                                     "config.json of another kind?")  # fmt: skip
                if target.shape != tensor.shape:
                    raise ModelError(
                        f"tensor {stored} of {source} has shape {list(tensor.shape)}, expected {list(target.shape)}; "
                        "it drafts for another model"
                    )
                if target.is_floating_point() != tensor.is_floating_point() or tensor.element_size() == 1:
                    raise ModelError(f"tensor {stored} of {source} is {tensor.dtype}, which is not supported there")
                target.copy_(tensor)
    if missing:
        raise ModelError(f"{source} lacks {len(missing)} tensors, among them {sorted(missing)[0]}")


def head_format(folder: Path, weights: str | None, dtype: torch.dtype, device: torch.device) -> WeightFormat | None:
    """What a head's matrices are packed in: on a CPU as EngineConfig.weights says. None leaves them to torch."""
    packs = weights is not None and device.type == "cpu" and dtype == torch.float32
    return weight_format(weights, stored_dtype(folder)) if packs else None


def head_bytes(head: nn.Module, packed: WeightFormat | None) -> int:
    """That the weights of an outlined head will take."""
    packable = [module for module in head.modules() if isinstance(module, Linear | MixtureOfExperts)]
    matrices = sum(module.num_weights for module in packable)
    stored = sum(part.nbytes for part in [*head.parameters(), *head.buffers()])
    if packed is None:
        return stored
    return stored + int(matrices * (packed.bytes_per_weight - torch.float32.itemsize))


def read_bytes(module: nn.Module) -> int:
    """That a pass reads of the weights of a loaded module, without routed experts."""
    routed = [part for part in module.modules() if isinstance(part, MixtureOfExperts)]
    experts = sum(part.num_experts * part.expert_bytes for part in routed)
    packed = sum(part.packed_bytes for part in module.modules() if isinstance(part, Linear | MixtureOfExperts))
    return packed + sum(parameter.nbytes for parameter in module.parameters()) - experts


def loaded(
    head: nn.Module,
    weights: Iterable[tuple[str, torch.Tensor]],
    translate: Translate,
    source: Path,
    packed: WeightFormat | None,
    device: torch.device,
) -> nn.Module:
    """The outlined head with its weights, on the device."""
    head = head.to_empty(device=device).requires_grad_(False)
    filled(head, weights, translate, source)
    if packed is not None:
        for module in [module for module in head.modules() if isinstance(module, Linear | MixtureOfExperts)]:
            module.pack(packed)
    return head.eval()
