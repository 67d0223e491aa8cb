"""The history of a request's own tokens, for penalties, and the LZ penalty."""

from collections.abc import Sequence

import numpy as np
import torch

from engine.token.sampling.row_table import RowTable

LZ_WINDOW = 512  # output tokens in which a repetition is looked for
LZ_MATCH = 32  # ... and how much of it counts


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
        vocab_size = self._counts.values.shape[1]
        seen = torch.bincount(torch.tensor(prompt), minlength=vocab_size) > 0
        counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=vocab_size)
        self._prompt.values[row] = seen.to(self._device)
        self._counts.values[row] = counts.to(self._device, torch.float32)
        return row

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
