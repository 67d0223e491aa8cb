"""How attention is cut for one kind of launch: chosen ahead, so that a server never tunes while it serves.

The figures come from what a tile takes of a multiprocessor of compute capability 9.0: 65,536 registers and 227 KiB of
shared memory. `tests/bench/triton_attention.py` sweeps them on a device.
"""

from dataclasses import dataclass

SHORT_TOKENS = 8  # a sequence with at most as many new tokens is a decode or a verification: bound by memory
SHORT_ROWS = (16, 64)  # bounds of a tile's rows: what tensor cores take at least, and what still leaves registers


@dataclass(frozen=True, slots=True)
class Tiles:
    """One kind of launch."""

    block_m: int  # rows of queries: new tokens times the heads that share a KV head
    block_n: int  # keys
    num_warps: int
    num_stages: int  # tiles of keys on their way at the same time, and one
    resident: int  # programs that a multiprocessor holds
    waves: int  # programs of like length that all work is cut into, as a multiple of those that run at once
    least_tiles: int  # of a segment
    slack: int  # a block is cut if it has more than so many segments' tiles
    two_loops: bool  # tiles that all rows see are computed without masks


@dataclass(frozen=True, slots=True)
class Shape:
    """What the choice depends on."""

    group: int  # query heads of a KV head
    head_dim: int
    value_dim: int
    query_bytes: int  # of one element
    kv_bytes: int


def short_tiles(shape: Shape, num_new: int) -> Tiles:
    """For sequences of up to `num_new` new tokens, SHORT_TOKENS at most."""
    rows = min(max(padded(shape.group * num_new), SHORT_ROWS[0]), SHORT_ROWS[1])
    wide = padded(shape.value_dim)
    if wide > 256:  # latent: keys are the values, too
        return Tiles(rows, 32 if shape.query_bytes < 4 else 16, 4 if rows < 64 else 8, 2, 1, 4, 4, 1, False)
    keys = max(16, min(128, 64 * 256 // (wide * shape.query_bytes)))
    return Tiles(rows, keys, 4, 3, 2, 4, 2, 1, False)


def long_tiles(shape: Shape) -> Tiles:
    """For prompts and their chunks."""
    wide = padded(shape.value_dim)
    if wide > 256:
        return Tiles(64 if shape.query_bytes < 4 else 16, 32 if shape.query_bytes < 4 else 16, 8, 2, 1, 1, 8, 2, False)
    if shape.query_bytes == 4:  # on CUDA cores: exact, and no kind to hurry for
        return Tiles(32, 32, 4, 2, 2, 1, 8, 2, False)
    if wide > 128:
        return Tiles(128, 32, 8, 3, 1, 1, 8, 2, True)
    return Tiles(128, 128, 8, 2, 1, 1, 4, 2, True)


def padded(size: int) -> int:
    """The power of two that is not below it, and 16 at least."""
    return max(16, 1 << (size - 1).bit_length())
