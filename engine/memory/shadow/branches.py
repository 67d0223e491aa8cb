"""How known sequences went on behind a prefix, and where a new one leaves all of them, to the token."""

from array import array
from bisect import bisect_left
from collections.abc import Sequence

TOKEN_BYTES = array("i").itemsize


def packed(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


# One, as most prefixes have, or several in order: a list for each would keep the garbage collector busy.
Branches = bytes | list[bytes] | None


def listed(branches: Branches) -> list[bytes]:
    return branches if isinstance(branches, list) else [] if branches is None else [branches]


def added(branches: Branches, branch: bytes) -> Branches:
    """The branches of a prefix with one more; the same if it was there."""
    if branches is None or branches == branch:
        return branch
    several = listed(branches)
    at = bisect_left(several, branch)
    if at == len(several) or several[at] != branch:
        several.insert(at, branch)
    return several


def removed(branches: Branches, branch: bytes) -> Branches:
    """The branches of a prefix without one of them."""
    several = listed(branches)
    at = bisect_left(several, branch)
    assert several[at] == branch, "a branch is lost"
    del several[at]
    return several or None


def follow(branches: Branches, tokens: bytes) -> tuple[int, bool]:
    """How many `tokens` some branch has too, and whether one that shares so many goes on otherwise behind them.

    Among sorted strings the one that shares most with another is beside it.
    """
    several = listed(branches)
    at = bisect_left(several, tokens)
    furthest, leaves = 0, False
    for branch in several[max(0, at - 1) : at + 1]:
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
