"""What one live request does to its logits, sorted out once when it first draws."""

from collections.abc import Sequence
from typing import Protocol

import torch

from engine.sampling import GREEDY_BELOW, SamplingParams
from engine.token.sampling.penalties import LzHistory, TokenHistory
from engine.token.sampling.row_table import RowTable


class Drawer(Protocol):
    """What the sampler knows of a request."""

    id: str
    sampling: SamplingParams
    token_ids: list[int]  # prompt, then output
    prompt_tokens: int


class Controls:
    """The controls of one request, with its rows in the device tables. Made again from the tokens at any time."""

    def __init__(self, request: Drawer, vocab_size: int, history: TokenHistory, biases: RowTable):
        params = request.sampling
        output = request.token_ids[request.prompt_tokens :]
        self.num_tokens = len(request.token_ids)  # what the histories know of
        self.random = params.temperature >= GREEDY_BELOW
        self.floors = params.min_p > 0 or params.top_n_sigma > 0
        self.sorts = params.top_k > 0 or params.top_p < 1
        self.edits = False
        self.penalty_row: int | None = None
        self.bias_row: int | None = None
        self.draw_row: int | None = None  # where fused draws find how it draws
        self.lz: LzHistory | None = None
        self.bad_words: dict[int, list[list[int]]] = {}  # longer than a token, by the token before their last
        if (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1, 0, 0):
            self.penalty_row = history.enter(request.token_ids[: request.prompt_tokens], output)
        if params.lz_penalty:
            self.lz = LzHistory(vocab_size, output)
        single = [word[0] for word in params.bad_words if len(word) == 1]
        if params.logit_bias or params.allowed_token_ids or single:
            self.bias_row = biases.take()
            biases.values[self.bias_row] = _static_bias(params, single, vocab_size).to(biases.values.device)
        for word in params.bad_words:
            if len(word) > 1:
                self.bad_words.setdefault(word[-2], []).append(word)
        self.min_tokens = params.min_tokens if params.stop_token_ids else 0
        self.stop_token_ids = params.stop_token_ids
        self.edits = (
            self.penalty_row is not None
            or self.bias_row is not None
            or self.lz is not None
            or bool(self.bad_words)
            or self.min_tokens > 0
            or params.grammar is not None
        )

    def changes(self, request: Drawer, position: int) -> tuple[Sequence[int], Sequence[float]]:
        """Tokens whose logits the draw at `position` adds something to, besides what the tables hold; -inf forbids."""
        tokens: list[int] = []
        values: list[float] = []
        if self.lz is not None:
            found, bits = self.lz.savings()
            tokens += found.tolist()
            values += (-request.sampling.lz_penalty * bits).tolist()
        num_output = position - request.prompt_tokens
        forbidden = [
            word[-1]
            for word in self.bad_words.get(request.token_ids[-1], ())
            if len(word) <= num_output + 1 and request.token_ids[-len(word) + 1 :] == word[:-1]
        ]
        if num_output < self.min_tokens:
            forbidden += self.stop_token_ids
        return tokens + forbidden, values + [-torch.inf] * len(forbidden)


def _static_bias(params: SamplingParams, forbidden: list[int], vocab_size: int) -> torch.Tensor:
    bias = torch.zeros(vocab_size)
    for token, value in params.logit_bias.items():
        bias[token] = value
    if params.allowed_token_ids:
        masked = torch.full((vocab_size,), -torch.inf)
        masked[params.allowed_token_ids] = 0
        bias += masked
    bias[forbidden] = -torch.inf
    return bias
