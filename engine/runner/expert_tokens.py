"""How many tokens each expert of a mixture got: of a sample of the steps, since counting them takes time."""

import torch

from sojourn.engine.compute.buffers import to_host
from sojourn.engine.token.models.decoder import Decoder
from sojourn.engine.token.models.moe import MixtureOfExperts

EVERY = 16  # steps between two that are counted; steps that a graph replays are in no sample


class ExpertTokens:
    """Counts in the routers' own pass. Every rank routes all tokens, so that one rank knows all experts of its
    layers. Without a model, or of one without routed experts, it counts nothing."""

    def __init__(self, model: Decoder | None):
        layers = [] if model is None else model.layers
        self._mixtures = [layer.mlp for layer in layers if isinstance(layer.mlp, MixtureOfExperts)]
        self._steps = 0

    def begin(self, found: list[torch.Tensor]) -> None:
        """Before a forward pass: in a counted step `found` gets one tensor [num_experts] int64 a layer, on the host
        once the step is over."""
        if not self._mixtures:
            return
        is_counted = self._steps % EVERY == 0
        if is_counted or self._steps % EVERY == 1:
            for mixture in self._mixtures:
                mixture.watch = self._watch(mixture.num_experts, found) if is_counted else None
        self._steps += 1

    @staticmethod
    def _watch(num_experts: int, found: list[torch.Tensor]):
        def count(experts: torch.Tensor) -> None:
            if experts.is_cuda and torch.cuda.is_current_stream_capturing():  # a graph would copy to the host each time
                return
            chosen = experts.flatten().long()
            counts = torch.zeros(num_experts, dtype=torch.int64, device=experts.device)
            found.append(to_host(counts.scatter_add_(0, chosen, torch.ones_like(chosen))))

        return count


def summed(found: list[torch.Tensor]) -> tuple[list[int], list[int]]:
    """Tokens by expert, all layers together; and of each layer the most of an expert over the mean, in percent."""
    if not found:
        return [], []
    counts = torch.stack(found)
    imbalance = 100 * counts.max(dim=1).values.double() / counts.double().mean(dim=1).clamp(min=1e-9)
    return counts.sum(dim=0).tolist(), imbalance.round().long().tolist()
