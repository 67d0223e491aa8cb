"""What one live request does to its logits, made once when it is first sampled."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from engine.compute.logits import LogitEdits
from engine.sampling import GREEDY_BELOW, SamplingParams
from engine.token.sampling.penalties import LzHistory, TokenHistory
from engine.token.sampling.row_table import RowTable


class SamplingRequest(Protocol):
    """A request as the sampler sees it."""

    id: str
    sampling: SamplingParams
    token_ids: list[int]  # prompt, then output
    prompt_tokens: int


class SamplingState:
    """The sampling controls of one request, with its rows in the device tables. Can be made again from the tokens."""

    def __init__(self, request: SamplingRequest, vocab_size: int, history: TokenHistory, biases: RowTable):
        params = request.sampling
        output = request.token_ids[request.prompt_tokens :]
        self.num_tokens = len(request.token_ids)  # that the histories include
        self.random = params.temperature >= GREEDY_BELOW
        self.sorts = params.top_k > 0 or params.top_p < 1
        self.penalty_row: int | None = None
        self.bias_row: int | None = None
        self.parameter_row: int | None = None  # of the fused sampler's table
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

    def additions(self, request: SamplingRequest, position: int) -> tuple[Sequence[int], Sequence[float]]:
        """Tokens, and what is added to their logits at `position` besides what the tables hold; -inf forbids."""
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


def logit_edits(
    edited: Sequence[int],
    requests: Sequence[SamplingRequest],
    positions: Sequence[int],
    states: Sequence[SamplingState],
    tensor: Callable[[Sequence, torch.dtype], torch.Tensor],
) -> LogitEdits:
    """The edits of the rows `edited`, of requests whose tokens will stand at `positions`. `tensor` makes them."""
    histories, biases, masks, penalties = [], [], [], []
    rows, tokens, values = [], [], []
    num_masked = 0
    for place, row in enumerate(edited):
        params, state = requests[row].sampling, states[row]
        histories.append(-1 if state.penalty_row is None else state.penalty_row)
        biases.append(-1 if state.bias_row is None else state.bias_row)
        masks.append(-1 if params.grammar is None else num_masked)
        num_masked += params.grammar is not None
        penalties.append((params.repetition_penalty, params.frequency_penalty, params.presence_penalty))
        added, amounts = state.additions(requests[row], positions[row])
        rows += [place] * len(added)
        tokens += added
        values += amounts
    whole = torch.int64
    counted = [(row, history) for row, history in zip(edited, histories, strict=True) if history >= 0]
    return LogitEdits(
        *(tensor(column, whole) for column in (edited, histories, biases, masks)),
        tensor(penalties, torch.float32),
        tuple(tensor(column, whole) for column in zip(*counted, strict=True)) if counted else None,
        (tensor(rows, whole), tensor(tokens, whole), tensor(values, torch.float32)) if tokens else None,
    )


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
