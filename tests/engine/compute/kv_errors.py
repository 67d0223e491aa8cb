"""How far keys and values may move when they are quantised: the bounds of docs/kv_cache.md."""

import torch

from sojourn.engine.compute.kv_formats import GROUP, KV_INT4, KV_INT8


def error_bound(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a number may be off by, as docs/kv_cache.md says. x [..., head_dim]."""
    if dtype == KV_INT4:
        pairs = x.unflatten(-1, (2, -1)).split(GROUP // 2, -1)
        low, high = (
            [of(pair, (-2, -1), keepdim=True).expand_as(pair) for pair in pairs] for of in (torch.amin, torch.amax)
        )
        bounds = [(top - least + least.abs() / 64) / 29 for top, least in zip(high, low, strict=True)]
        return torch.cat(bounds, -1).flatten(-2) + 1e-30
    largest = x.abs().amax(-1, keepdim=True)
    if dtype == KV_INT8:
        return (largest / 254).expand_as(x) + 1e-30
    return torch.maximum(2**-4 * x.abs(), 2**-10 / 448 * largest) + 1e-30
