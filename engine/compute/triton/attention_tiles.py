"""How attention is cut for one kind of launch: chosen ahead, so that a server never tunes while it serves.

The figures come from what a tile takes of a multiprocessor of compute capability 9.0: 65,536 registers and 227 KiB of
shared memory. `bench/kernels/triton_attention.py` sweeps them on a device.
"""

from dataclasses import dataclass

SHORT_TOKENS = 8  # a sequence with at most as many new tokens is a decode or a verification: bound by memory


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
    slack: int = 1  # a block is cut if it has more than so many segments' tiles
    two_loops: bool = False  # tiles that all rows see are computed without masks


@dataclass(frozen=True, slots=True)
class Shape:
    """What the choice depends on."""

    group: int  # query heads of a KV head
    head_dim: int
    value_dim: int
    query_bytes: int  # of one element
    kv_bytes: int
    wide: bool = False  # the cache needs 64-bit offsets


def short_tiles(shape: Shape, num_new: int) -> Tiles:
    """For sequences of up to `num_new` new tokens, SHORT_TOKENS at most."""
    size = padded(shape.value_dim)
    rows = padded(shape.group * num_new)
    if shape.query_bytes == 4:  # on CUDA cores, whose registers hold no more
        return Tiles(16, max(16, min(64, 4096 // (2 * size))), 4, 3 if size <= 256 else 2, 2, 4, 4)
    if size > 256:  # latent: keys are the values, too
        if shape.kv_bytes == 1:
            return Tiles(min(rows, 32), 32, 8, 2, 1, 4, 4)
        return Tiles(16, 32, 4, 2, 3, 2, 4) if rows == 16 else Tiles(min(rows, 64), 32, 8, 2, 1, 2, 4)
    rows = min(rows, 64 if size <= 128 else 32)
    if shape.kv_bytes == 1:
        # What is read as bytes and multiplied in 16 bits takes registers twice; masks of padding take more.
        keys = 32 if size > 128 else 128 // (1 if rows == 16 else 2) // (1 if size == shape.value_dim else 2)
        return Tiles(rows, keys, 4, 3, 2, 4, 2)
    return Tiles(rows, max(32, min(128, 8192 // size)), 4, 3, 3 if rows == 16 else 2, 4, 2)


def long_tiles(shape: Shape) -> Tiles:
    """For prompts and their chunks."""
    size = padded(shape.value_dim)
    if shape.query_bytes == 4:
        return Tiles(16, max(16, min(64, 4096 // (2 * size))), 4, 2, 2, 2, 8, 3)
    if size > 256:
        return Tiles(64 if shape.kv_bytes == 2 else 32, 32, 8, 2, 1, 2, 8, 3)
    if size > 128:
        return Tiles(128, *((32, 8, 3) if shape.kv_bytes == 2 else (16, 8, 2)), 1, 2, 8, 3, True)
    if shape.wide or shape.kv_bytes == 1:
        return Tiles(128, 64, 8, 3, 1, 2, 8, 3, True)
    return Tiles(128, 128, 8, 2, 1, 2, 4, 3, True)


def padded(size: int) -> int:
    """The power of two that is not below it, and 16 at least."""
    return max(16, 1 << (size - 1).bit_length())
