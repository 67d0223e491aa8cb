"""What live requests do to their logits: their tables on the device, the histories of their tokens, their edits."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from sojourn.engine.compute.buffers import to_device
from sojourn.engine.compute.logits import LogitEdits
from sojourn.engine.sampling import GREEDY_BELOW, SamplingParams

LZ_WINDOW = 512  # output tokens in which a repetition is looked for
LZ_MATCH = 32  # output tokens of a repetition that count, at most


class RowTable:
    """Rows [width] of one type, by request: a step gathers rows instead of building them.

    Grows by doubling; a given row is dirty until its owner fills it.
    """

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device, num_rows: int = 0):
        self.values = torch.empty((num_rows, width), dtype=dtype, device=device)
        self._free = list(range(num_rows - 1, -1, -1))

    def take(self) -> int:
        if not self._free:
            old = len(self.values)
            grown = self.values.new_empty((max(4, 2 * old), self.values.shape[1]))
            grown[:old] = self.values
            self.values = grown
            self._free = list(range(len(grown) - 1, old - 1, -1))
        return self._free.pop()

    def give_back(self, row: int) -> None:
        self._free.append(row)

    @property
    def used(self) -> int:
        return len(self.values) - len(self._free)


class TokenHistory:
    """Which tokens stand in the prompt of each penalised request, and how often in its output.

    Counts are made when a request is sampled first, and again after a preemption. Then they follow each sampled token
    on the device.
    """

    def __init__(self, vocab_size: int, device: torch.device):
        self._prompt = RowTable(vocab_size, torch.bool, device)
        self._counts = RowTable(vocab_size, torch.float32, device)  # whole numbers; float saves a conversion a step
        self._device = device

    @property
    def used(self) -> int:
        return self._counts.used

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[rows, vocab_size] each: bool, whether a token stands in the prompt; float32, how often in the output."""
        return self._prompt.values, self._counts.values

    def enter(self, prompt: Sequence[int], output: Sequence[int]) -> int:
        row, twin = self._counts.take(), self._prompt.take()
        assert row == twin, "both tables give the same rows"
        ids = to_device(torch.tensor([*prompt, *output], dtype=torch.int64), self._device)
        self._prompt.values[row].zero_().index_fill_(0, ids[: len(prompt)], True)
        ones = torch.ones(len(output), device=self._device)
        self._counts.values[row].zero_().index_add_(0, ids[len(prompt) :], ones)
        return row

    def branch(self, row: int, token_ids: Sequence[int]) -> int:
        """A new row: `row` with an output that goes on with these tokens."""
        branched, twin = self._counts.take(), self._prompt.take()
        assert branched == twin, "both tables give the same rows"
        self._prompt.values[branched] = self._prompt.values[row]
        self._counts.values[branched] = self._counts.values[row]
        self.follow(branched, token_ids)
        return branched

    def follow(self, row: int, token_ids: Sequence[int]) -> None:
        """The output of one row goes on with these tokens."""
        ids = to_device(torch.tensor(token_ids, dtype=torch.int64), self._device)
        self._counts.values[row].index_add_(0, ids, torch.ones(len(token_ids), device=self._device))

    def leave(self, row: int) -> None:
        self._counts.give_back(row)
        self._prompt.give_back(row)

    def count(self, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Each of `rows` sampled one token. Rows are distinct."""
        self._counts.values[rows, token_ids] += 1


class LzHistory:
    """The LZ penalty of one request (Ginart et al., 2025, arXiv 2504.20131), as the authors' own code computes it.

    A sliding-window coder writes a token that stands d tokens back for log2 d bits, and a new one for log2 V. Of all
    occurrences of a token within the last 512 output tokens, the one counts that follows the longest copy (of at most
    32) of what the output now ends with; of equally long ones the nearest. A token's logit is lowered by the strength
    times the bits that the copy saves, log2 V - log2 d; tokens that do not occur keep theirs.
    """

    def __init__(self, vocab_size: int, output: Sequence[int]):
        self._vocab_size = vocab_size
        self._bits = np.log2(vocab_size)
        self._tokens = np.empty(2 * LZ_WINDOW, dtype=np.int64)
        self._length = 0  # of _tokens
        self.follow(output[-LZ_WINDOW:])

    def follow(self, added: Sequence[int]) -> None:
        """Takes in what was added to the output since the last time."""
        for token in added:
            if self._length == len(self._tokens):  # makes room once in 512 tokens
                self._tokens[:LZ_WINDOW] = self._tokens[LZ_WINDOW:]
                self._length = LZ_WINDOW
            self._tokens[self._length] = token
            self._length += 1

    def branch(self, added: Sequence[int]) -> "LzHistory":
        """A history of its own for an output that goes on with these tokens."""
        window = self._tokens[max(0, self._length - LZ_WINDOW) : self._length]
        return LzHistory(self._vocab_size, [*window.tolist(), *added])

    def savings(self) -> tuple[np.ndarray, np.ndarray]:
        """Distinct tokens of the window, and the bits that a coder saves on each, above 0."""
        window = self._tokens[max(0, self._length - LZ_WINDOW) : self._length]
        size = len(window)
        if not size:
            return window, np.empty(0)
        # matched[i]: how many tokens before position i are those that the output ends with.
        matched = np.zeros(size, dtype=np.int64)
        alive = np.arange(1, size)
        for back in range(1, min(LZ_MATCH, size - 1) + 1):
            alive = alive[alive >= back]
            alive = alive[window[alive - back] == window[size - back]]
            if not len(alive):
                break
            matched[alive] = back
        order = np.lexsort((np.arange(size), matched))[::-1]  # longest first, then nearest
        tokens, first = np.unique(window[order], return_index=True)
        distances = size - order[first]
        bits = self._bits - np.log2(distances)
        return tokens[bits > 0], bits[bits > 0]


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
        self.is_uncounted = False  # what the last step sampled is not in the histories: it had drafts
        self.bad_words: dict[int, list[list[int]]] = {}  # longer than a token, by the token before their last
        if params.penalties != (1, 0, 0):
            self.penalty_row = history.enter(request.token_ids[: request.prompt_tokens], output)
        if params.lz_penalty:
            self.lz = LzHistory(vocab_size, output)
        single = [word[0] for word in params.bad_words if len(word) == 1]
        if params.logit_bias or params.allowed_token_ids or single:
            self.bias_row = biases.take()
            biases.values[self.bias_row] = to_device(_static_bias(params, single, vocab_size), biases.values.device)
        for word in params.bad_words:
            if len(word) > 1:
                self.bad_words.setdefault(word[-2], []).append(word)
        self.min_tokens = params.min_tokens if params.stop_token_ids else 0
        self.edits = (
            self.penalty_row is not None
            or self.bias_row is not None
            or self.lz is not None
            or bool(self.bad_words)
            or self.min_tokens > 0
            or params.grammar is not None
        )

    def follow(self, added: Sequence[int], history: TokenHistory) -> None:
        """Counts tokens that were sampled in a step with drafts."""
        if self.penalty_row is not None:
            history.follow(self.penalty_row, added)
        if self.lz is not None:
            self.lz.follow(added)
        self.num_tokens += len(added)
        self.is_uncounted = False

    def additions(
        self, request: SamplingRequest, position: int, drafts: Sequence[int] = (), lz: "LzHistory | None" = None
    ) -> tuple[Sequence[int], Sequence[float]]:
        """Tokens, and what is added to their logits at `position` besides what the tables hold; -inf forbids. Behind
        `drafts` it is `lz` that knows them."""
        tokens: list[int] = []
        values: list[float] = []
        if (lz := lz or self.lz) is not None:
            found, bits = lz.savings()
            tokens += found.tolist()
            values += (-request.sampling.lz_penalty * bits).tolist()
        num_output = position - request.prompt_tokens
        last = drafts[-1] if drafts else request.token_ids[-1]
        forbidden = [
            word[-1]
            for word in self.bad_words.get(last, ())
            if len(word) <= num_output + 1
            and [*request.token_ids[-len(word) + 1 :], *drafts][-len(word) + 1 :] == word[:-1]
        ]
        if num_output < self.min_tokens:
            forbidden += request.sampling.stop_token_ids
        return tokens + forbidden, values + [-torch.inf] * len(forbidden)


class DraftedState:
    """The controls of a request behind some of its drafts. Its history is a row of its own, for one step."""

    def __init__(self, state: SamplingState, drafts: Sequence[int], history: TokenHistory):
        self._state, self._drafts = state, drafts
        self.random, self.sorts, self.edits = state.random, state.sorts, state.edits
        self.bias_row, self.parameter_row = state.bias_row, state.parameter_row
        self.penalty_row = None if state.penalty_row is None else history.branch(state.penalty_row, drafts)
        self.is_uncounted = True

    def additions(self, request: SamplingRequest, position: int) -> tuple[Sequence[int], Sequence[float]]:
        state = self._state
        lz = None if state.lz is None else state.lz.branch(self._drafts)
        return state.additions(request, position, self._drafts, lz)


def logit_edits(
    edited: Sequence[int],
    requests: Sequence[SamplingRequest],
    positions: Sequence[int],
    states: Sequence[SamplingState | DraftedState],
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
        penalties.append(params.penalties)
        added, amounts = state.additions(requests[row], positions[row])
        rows += [place] * len(added)
        tokens += added
        values += amounts
    whole = torch.int64
    counted = [
        (row, history)
        for row, history in zip(edited, histories, strict=True)
        if history >= 0 and not states[row].is_uncounted
    ]
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
