"""How probable the model itself found tokens: natural log-probabilities before any sampling control, in float32."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sojourn.engine.compute.buffers import to_host
from sojourn.engine.sampling import TokenLogprobs

CHUNK_ELEMENTS = 1 << 24  # of float32 logits scored together: a long prompt then needs little memory


class Scores(NamedTuple):
    """Scores of some tokens, on the device or the host."""

    token_ids: torch.Tensor  # [rows] int64
    logprobs: torch.Tensor  # [rows] float32
    ranks: torch.Tensor  # [rows] int64, 1 is the most probable
    top_ids: torch.Tensor  # [rows, top] int64
    top_logprobs: torch.Tensor  # [rows, top] float32, best first

    def to_host(self) -> "Scores":
        """Valid when the device's work up to here is done."""
        return Scores(*map(to_host, self))

    def logprobs_of(self, tops: Sequence[int]) -> list[TokenLogprobs]:
        """`tops` says how many of the most probable tokens each row wants."""
        columns = [column.tolist() for column in self]
        return [
            TokenLogprobs(token, logprob, rank, list(zip(ids[:top], logprobs[:top], strict=True)))
            for token, logprob, rank, ids, logprobs, top in zip(*columns, tops, strict=True)
        ]


def score(logits: torch.Tensor, token_ids: torch.Tensor, top: int) -> Scores:
    """Scores `token_ids` [rows] under `logits` [rows, vocab_size] float32, beside the `top` most probable tokens."""
    normaliser = logits.logsumexp(dim=-1, keepdim=True)
    # A row without a token to sample has a negative id; its score is not read.
    chosen = logits.gather(-1, token_ids.clamp(min=0)[:, None])
    ranks = (logits > chosen).sum(dim=-1) + 1
    best, ids = logits.topk(min(top, logits.shape[-1]), dim=-1)
    return Scores(token_ids, (chosen - normaliser)[:, 0], ranks, ids, best - normaliser)


def chunks(rows: int, vocab_size: int) -> list[slice]:
    """Rows of logits that are computed and scored together."""
    size = max(1, CHUNK_ELEMENTS // vocab_size)
    return [slice(begin, min(begin + size, rows)) for begin in range(0, rows, size)]
