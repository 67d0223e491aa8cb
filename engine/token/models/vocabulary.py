"""The vocabulary spread over ranks: each looks up, and scores, its own tokens (Shoeybi et al., 2019, Megatron-LM)."""

import torch
import torch.nn.functional as F

from sojourn.engine.compute.communication.communicator import Communicator


def embedded(ids: torch.Tensor, rows: torch.Tensor, tokens: range) -> torch.Tensor:
    """ids [num_tokens] → their vectors [num_tokens, hidden_size] from the `rows` of `tokens`, or zeros."""
    places = ids - tokens.start
    outside = (places < 0) | (places >= len(tokens))
    return F.embedding(places.masked_fill(outside, 0), rows).masked_fill_(outside[:, None], 0)


def gathered_logits(logits: torch.Tensor, vocab_size: int, stage: Communicator) -> torch.Tensor:
    """Each rank's logits [rows, own tokens] → those of all tokens [rows, vocab_size], on every rank."""
    most = -(-vocab_size // stage.size)
    if logits.shape[1] < most:  # of the last rank
        logits = F.pad(logits, (0, most - logits.shape[1]))
    return stage.all_gather(logits.contiguous()).transpose(0, 1).flatten(1)[:, :vocab_size]
