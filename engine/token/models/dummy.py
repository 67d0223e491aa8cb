"""Random weights for a model of any shape: benchmarks need the sizes of a checkpoint, not its contents."""

import torch
from torch import nn

STANDARD_DEVIATION = 0.02  # of trained models' initial weights; with norms in every layer, activations stay near one
SEED = 0


@torch.no_grad()
def fill_with_random_weights(model: nn.Module) -> None:
    """Fills every parameter where it lies, in its own dtype: matrices at random, norms with ones, biases with zeros.

    The same device and shape give the same weights; a CPU and a GPU have different generators.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(SEED)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            parameter.normal_(0.0, STANDARD_DEVIATION, generator=generator)
        else:
            parameter.fill_(0.0 if "bias" in name else 1.0)
