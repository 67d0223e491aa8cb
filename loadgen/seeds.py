"""Seeds that are the same in every process and on every machine."""

import hashlib

import numpy as np


def stable_seed(*parts: object) -> int:
    """The same 64 bits for the same parts in every process. Python's own hash is salted."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest())


def seeded_rng(*parts: object) -> np.random.Generator:
    """A generator of its own for these parts, so that other draws do not shift its numbers."""
    return np.random.default_rng(stable_seed(*parts))
