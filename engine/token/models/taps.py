"""What a forward pass gives beside its last hidden states."""

from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class Taps:
    """What a forward pass gives besides its last hidden states, and how deep it goes."""

    layers: tuple[int, ...] = ()  # ascending: the residual streams behind these are copied; -1: the embeddings
    depth: int | None = None  # layers that are computed, before the last norm; None: all
    streams: list[torch.Tensor] = field(default_factory=list)  # [num_tokens, hidden_size] each, of the last pass

    def stops(self, num_layers: int) -> list[int]:
        """The numbers of layers after which the pass has something to copy, or ends."""
        self.streams.clear()
        depth = num_layers if self.depth is None else self.depth
        return sorted({layer + 1 for layer in self.layers} | {depth})

    def take(self, num_computed: int, residual: torch.Tensor) -> None:
        if num_computed - 1 in self.layers:
            self.streams.append(residual.clone())
