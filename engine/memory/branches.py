"""How known sequences went on behind a prefix, and where a new one leaves all of them, to the token."""

from array import array
from bisect import bisect_left
from collections.abc import Sequence

TOKEN_BYTES = array("i").itemsize


def packed(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


def add(branches: list[bytes], branch: bytes) -> bool:
    """Adds a branch to those of its prefix, which are sorted; False if it was there."""
    at = bisect_left(branches, branch)
    if at < len(branches) and branches[at] == branch:
        return False
    branches.insert(at, branch)
    return True


def remove(branches: list[bytes], branch: bytes) -> None:
    at = bisect_left(branches, branch)
    assert branches[at] == branch, "a branch is lost"
    del branches[at]


def follow(branches: list[bytes], tokens: bytes) -> tuple[int, bool]:
    """How many `tokens` some branch has too, and whether one that shares so many goes on otherwise behind them.

    Among sorted strings the one that shares most with another is beside it.
    """
    at = bisect_left(branches, tokens)
    furthest, leaves = 0, False
    for branch in branches[max(0, at - 1) : at + 1]:
        shared = _shared(branch, tokens)
        goes_on = len(branch) > shared * TOKEN_BYTES
        if shared > furthest:
            furthest, leaves = shared, goes_on
        elif shared == furthest:
            leaves |= goes_on
    return furthest, leaves


def _shared(one: bytes, other: bytes) -> int:
    """Tokens with which both begin."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length // TOKEN_BYTES
    return next(i for i in range(length) if one[i] != other[i]) // TOKEN_BYTES
