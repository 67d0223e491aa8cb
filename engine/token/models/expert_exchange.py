"""Tokens that travel to the ranks of their experts and back, in place of a sum over ranks.

Each rank of a stage has all tokens, since attention is whole on each. So it takes an equal part of them: it routes
them, sends each once to every rank that holds an expert of it (dispatch), and adds up what comes back (combine). Then
all ranks gather all parts. (Lepikhin et al., "GShard", 2021.)
"""

import torch

from sojourn.engine.compute.communication.communicator import Communicator
from sojourn.engine.compute.operations.backend import Operations
from sojourn.engine.token.models.moe import MixtureOfExperts


def exchanged(mixture: MixtureOfExperts, x: torch.Tensor, operations: Operations, stage: Communicator) -> torch.Tensor:
    """The mixture's output [num_tokens, hidden_size] for x of the same shape, which all ranks of `stage` have."""
    if mixture.watch is not None:
        mixture.watch(mixture.routed(x)[1])  # of all tokens
    share = -(-len(x) // stage.size)
    own = x[stage.rank * share : (stage.rank + 1) * share]
    weights, experts = mixture.routed(own)
    to_rank = torch.zeros((len(own), stage.size), dtype=torch.bool, device=x.device)
    to_rank.scatter_(1, experts.long() // len(mixture.held), True)
    tokens = to_rank.t().nonzero()[:, 1]  # by rank, and each in the order of the tokens
    sent = to_rank.sum(0)
    received = stage.all_to_all(sent, [1] * stage.size, [1] * stage.size).tolist()
    counts: list[int] = sent.tolist()
    packed = _packed(own[tokens], weights[tokens].float(), experts[tokens].int())
    there = _unpacked(stage.all_to_all(packed, counts, received), x, experts.shape[1])
    mixed = mixture.mixed(*there, operations) if sum(received) else x[:0]
    back = stage.all_to_all(mixed, received, counts)
    out = torch.zeros((share, x.shape[1]), dtype=x.dtype, device=x.device)
    begin = 0
    for rank, count in enumerate(counts):  # in the order of a sum over ranks, so that two ranks give the same numbers
        out[tokens[begin : begin + count]] += back[begin : begin + count]
        begin += count
        if rank == 0 and mixture.shared is not None and len(own):
            out[: len(own)] += mixture.shared(own, operations)
    return stage.all_gather(out).flatten(0, 1)[: len(x)]


def _packed(*parts: torch.Tensor) -> torch.Tensor:
    """Rows of several tensors as rows of bytes: one exchange in place of three."""
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)


def _unpacked(
    rows: torch.Tensor, like: torch.Tensor, num_chosen: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens as `like` [.., hidden_size], weights and experts [.., num_chosen]."""
    parts = rows.split([like.shape[1] * like.element_size(), 4 * num_chosen, 4 * num_chosen], dim=1)
    x, weights, experts = (
        part.contiguous().view(dtype)
        for part, dtype in zip(parts, (like.dtype, torch.float32, torch.int32), strict=True)
    )
    return x, weights, experts.long()
