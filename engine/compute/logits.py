"""Rows of logits: a step's edits by penalties, biases and masks with their torch reference, and the best token."""

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sojourn.engine.compute.cpp.extension import library

NOTHING = -1  # the id of a row whose masks leave no token
OVERFLOWED = -2  # the id of a row whose logits are no numbers


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """Rows of logits that change before they are sampled. Each names its rows of the tables; -1: none."""

    rows: torch.Tensor  # [edited] int64, of the logits
    history_rows: torch.Tensor  # [edited] int64
    bias_rows: torch.Tensor  # [edited] int64
    mask_rows: torch.Tensor  # [edited] int64
    penalties: torch.Tensor  # [edited, 3] float32: repetition, frequency, presence; read where there is a history
    counted: tuple[torch.Tensor, torch.Tensor] | None = None  # rows of the logits to count, and of histories [n]
    additions: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None  # edited rows, tokens int64, values [n]

    def add(self, edited: torch.Tensor) -> None:
        """Applies the additions to what `edit_rows` gave."""
        if self.additions is not None:
            rows, tokens, values = self.additions
            edited.index_put_((rows, tokens), values, accumulate=True)


def edit_rows(
    logits: torch.Tensor,
    edits: LogitEdits,
    prompts: torch.Tensor,
    counts: torch.Tensor,
    biases: torch.Tensor,
    masks: torch.Tensor | None,
) -> torch.Tensor:
    """[rows, vocab_size] float32 → [edited, vocab_size] float32, without the additions.

    `prompts` bool and `counts` float32 [history rows, vocab_size] say which tokens stand in a prompt, and how often in
    an output. `biases` [bias rows, vocab_size] float32 are added. `masks` [mask rows, words] int32 hold 32 tokens a
    word, a bit for each allowed token.
    """
    edited = logits[edits.rows]
    if len(counts):
        penalised = edits.history_rows >= 0
        histories = edits.history_rows[penalised]
        edited[penalised] = _penalised(
            edited[penalised], prompts[histories], counts[histories], edits.penalties[penalised]
        )
    biased = edits.bias_rows >= 0
    edited[biased] += biases[edits.bias_rows[biased]]
    if masks is not None:
        constrained = edits.mask_rows >= 0
        allowed = unpacked(masks[edits.mask_rows[constrained]], logits.shape[1])
        edited[constrained] = edited[constrained].masked_fill(~allowed, -torch.inf)
    return edited


def _penalised(
    logits: torch.Tensor, prompt: torch.Tensor, counts: torch.Tensor, penalties: torch.Tensor
) -> torch.Tensor:
    """[n, vocab_size] logits after the three penalties [n, 3].

    Repetition divides the positive and multiplies the negative logits of tokens in prompt or output (Keskar et al.,
    2019, with the sign rule of transformers and vLLM). Frequency and presence are subtracted, for each occurrence
    in the output and once for any.
    """
    repetition, frequency, presence = penalties.split(1, dim=1)
    in_output = counts > 0
    factor = torch.where(in_output | prompt, repetition, 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    return logits - frequency * counts - presence * in_output


def unpacked(masks: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[rows, words] int32, 32 tokens a word → [rows, vocab_size] bool."""
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    return ((masks[:, :, None] >> bits) & 1).flatten(1)[:, :vocab_size].bool()


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """[rows, vocab_size] → ids [rows] int64, the first of equals. Rows that hold NaN give any id.

    On a CPU torch compares one number after another, which takes longer than reading them from memory.
    """
    fitting = logits.is_cpu and logits.dtype == torch.float32 and logits.is_contiguous()
    kernel = _kernel() if fitting else None
    if kernel is None:
        return logits.argmax(dim=-1)
    rows, size = logits.shape
    ids = torch.empty(rows, dtype=torch.int64)
    kernel(logits.data_ptr(), ids.data_ptr(), rows, size)
    return ids


@functools.cache
def _kernel() -> Callable[..., None] | None:
    kernels = library()
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    return None if kernels is None else kernels.function("sojourn_argmax", pointer, pointer, integer, integer)
