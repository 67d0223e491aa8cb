"""Drafts one after another, of many sequences at once, until each has as many as it wants."""

from collections.abc import Callable

import numpy as np
import torch

# (ids of the last drafts, which sequences go on, their rows of the last call or None for all, how many each has) → the
# next ids
Following = Callable[[torch.Tensor, np.ndarray, torch.Tensor | None, int], torch.Tensor]


def greedy_chain(first: torch.Tensor, wanted: np.ndarray, following: Following) -> list[list[int]]:
    """Drafts of each sequence, `wanted` [num_sequences] of them, at least one. `first` [num_sequences] are those behind
    the known tokens. The host reads the ids once, at the end."""
    ids, active = first, np.arange(len(wanted))
    drawn, owners = [ids], [active]
    for depth in range(1, int(wanted.max())):
        goes_on, kept = wanted[active] > depth, None
        if not goes_on.all():
            kept, active = torch.from_numpy(np.flatnonzero(goes_on)).to(first.device), active[goes_on]
            ids = ids[kept]
        ids = following(ids, active, kept, depth)
        drawn.append(ids)
        owners.append(active)
    found: list[list[int]] = [[] for _ in wanted]
    for owner, token in zip(np.concatenate(owners).tolist(), torch.cat(drawn).tolist(), strict=True):
        found[owner].append(token)
    return found
