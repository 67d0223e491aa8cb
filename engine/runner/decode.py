"""A decode step as a CUDA graph holds it."""

from typing import Any

import torch

from sojourn.engine.compute.logits import OVERFLOWED
from sojourn.engine.runner.graphs import Decoded
from sojourn.engine.runner.tables import StepTensors


def decode(runner: Any, step: StepTensors, draw_rows: torch.Tensor, room: torch.Tensor | None = None) -> Decoded:
    """The work of a graph: a step of single tokens, whose lengths only the device knows, and their sampling, by
    a ModelRunner. The logits go to `room` [size at least, vocab_size]."""
    size = len(step.ids)
    if runner.adapters is not None:
        runner.adapters.backend.begin_decodes(size)
    hidden = runner.hidden(step, [1] * size, [1] * size)
    given = {}
    if runner.drafting is not None:
        taps, reads_hidden = runner.drafting.taps, runner.drafting.proposer.reads_hidden
        given = {"hidden": hidden if reads_hidden else None, "streams": [] if taps is None else list(taps.streams)}
    logits = runner.model.logits(hidden, None if room is None else room[:size], runner.logit_dtype)
    if runner.ranks is not None and runner.ranks.layout.rank > 0:  # rank 0 draws
        return Decoded(logits, None, step.sample_rows)
    if (fused := runner.sampler.fused) is not None:
        remember = (step.sample_rows, runner.tables.last_ids)
        return Decoded(logits, None, fused.draw_rows(logits, draw_rows, step.contexts, remember), **given)
    overflowed = runner.overflowed(hidden)
    ids = logits.argmax(dim=-1).masked_fill(overflowed, OVERFLOWED)
    runner.tables.remember(step.sample_rows, ids)
    return Decoded(logits, overflowed, ids, **given)
