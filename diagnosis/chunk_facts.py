"""How prompts were cut into chunks, and which limit cut them: the token budget of a step, or the limit of a chunk."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd

NEARLY = 0.95  # of a limit: a chunk may end at a block, a few tokens before it
FEWEST_PROMPTS = 5  # computed in a run: chunks of fewer say nothing


@dataclass(frozen=True, slots=True)
class Chunks:
    """Of the prompts that a run computed. Shares are 0 to 1."""

    per_prompt: float  # steps that a prompt took, on average over its tokens: a long prompt counts by its length
    cut_by_chunk_limit: float  # of the cuts (a chunk that is not the last of its prompt), those at the limit of a chunk
    cut_by_budget: float  # of the cuts, those in a step that was full
    budget_use: float  # tokens / budget of the steps with a cut chunk


def chunks_of(steps: pd.DataFrame, prompt_tokens: Mapping[str, int], engine: Mapping[str, Any]) -> Chunks | None:
    """From a `steps` table and the prompt lengths by request id; None for fewer than a few prompts."""
    if not len(steps):
        return None
    sizes = steps.request_ids.map(len).to_numpy(dtype="int64")
    place = np.repeat(np.arange(len(steps)), sizes)
    new, past = (np.fromiter(chain.from_iterable(steps[name]), "float64") for name in ("new_tokens", "past_tokens"))
    kinds = np.fromiter(chain.from_iterable(steps.kinds), object)
    names = np.fromiter(chain.from_iterable(steps.request_ids), object)
    full = np.bincount(place, weights=new, minlength=len(steps)) / np.maximum(steps.budget.to_numpy("float64"), 1)
    mine = kinds == "prefill"
    table = pd.DataFrame({"name": names[mine], "new": new[mine], "end": (past + new)[mine], "full": full[place[mine]]})
    table["prompt"] = table.name.map(prompt_tokens).astype("float64")
    table = table[table.prompt.notna()]
    if table.name.nunique() < FEWEST_PROMPTS:
        return None
    number = table.groupby("name").new.transform("size")
    cut = table[table.end < table.prompt]
    limit = engine.get("max_prefill_chunk_tokens")
    by_limit = (cut.new >= NEARLY * limit) if limit else pd.Series(False, index=cut.index)
    by_budget = (cut.full >= NEARLY) & ~by_limit
    return Chunks(
        per_prompt=float((number * table.new).sum() / max(table.new.sum(), 1)),
        cut_by_chunk_limit=float(by_limit.mean()) if len(cut) else 0.0,
        cut_by_budget=float(by_budget.mean()) if len(cut) else 0.0,
        budget_use=float(cut.full.mean()) if len(cut) else 0.0,
    )
