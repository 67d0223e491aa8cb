"""What of a model is filled while a checkpoint is read."""

from collections import Counter
from collections.abc import Iterable

import torch

from sojourn.engine.compute.linear import Linear
from sojourn.engine.compute.quantisation.parts import storage_of
from sojourn.engine.compute.weight_formats import WeightFormat
from sojourn.engine.token.models.moe import MixtureOfExperts


class Filling:
    """Counts the parts that are still to come, by the parameter that they are views of, and packs what is whole.

    So no more than one layer is held both as stored and packed."""

    def __init__(
        self,
        modules: Iterable[Linear | MixtureOfExperts],
        targets: Iterable[torch.Tensor],
        packs: WeightFormat | None,
    ):
        self.has_packed = False
        self._packs = packs
        self._to_come = Counter(map(storage_of, targets))
        packable = [module for module in modules if packs is not None and module.weights_to_pack]
        self._module_of = {storage_of(part): module for module in packable for part in _parts(module)}

    def filled(self, target: torch.Tensor) -> None:
        """A part is there; with the last part of a module, the module is packed."""
        self._to_come[storage_of(target)] -= 1
        module = self._module_of.get(storage_of(target))
        if module is None or any(self._to_come[storage_of(part)] for part in _parts(module)):
            return
        for part in _parts(module):
            del self._module_of[storage_of(part)]
        module.pack(self._packs)
        self.has_packed = True


def _parts(module: Linear | MixtureOfExperts) -> list[torch.Tensor]:
    return [*module.matrices(), *module.biases()]
