"""A model and the device that it is computed on."""

from dataclasses import dataclass
from pathlib import Path

import torch

from sojourn.engine.token.models.decoder import Decoder


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """Loaded, or the outline of a model that is planned for."""

    model: Decoder
    folder: Path
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    max_model_len: int
    max_tokens: int  # of one step

    @property
    def activation_bytes(self) -> int:
        """Of one number between two layers, at most: on a CPU kernels compute in float32."""
        return 4 if self.device.type == "cpu" else self.dtype.itemsize
