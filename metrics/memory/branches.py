"""How known sequences go on behind a prefix: packed tokens, or marks that stand for them, of 4 bytes each.

One, as most prefixes have, or several in order: a list for each would keep the garbage collector busy.
"""

from bisect import bisect_left

from sojourn.metrics.memory.known_prompts import TOKEN_BYTES, shared_tokens

TAILS = 64  # ends of sequences, less than a block, that are remembered behind one prefix
Branches = bytes | list[bytes] | None


def branches_of(branches: Branches) -> list[bytes]:
    return branches if isinstance(branches, list) else [] if branches is None else [branches]


def with_branch(branches: Branches, branch: bytes) -> Branches:
    """The branches of a prefix with one more; the same if it was there."""
    if branches is None or branches == branch:
        return branch
    several = branches_of(branches)
    at = bisect_left(several, branch)
    if at == len(several) or several[at] != branch:
        several.insert(at, branch)
    return several


def without_branch(branches: Branches, branch: bytes) -> Branches:
    several = branches_of(branches)
    at = bisect_left(several, branch)
    assert several[at] == branch, "a branch is lost"
    del several[at]
    return several or None


def follow_branches(branches: Branches, tokens: bytes) -> tuple[int, bool, bytes | None]:
    """The most `tokens` that a branch begins with, whether a branch that shares so many goes on otherwise, and a branch
    that shares so many, unless none shares any.

    Among sorted strings, the neighbour shares most.
    """
    several = branches_of(branches)
    at = bisect_left(several, tokens)
    furthest, leaves, followed = 0, False, None
    for branch in several[max(0, at - 1) : at + 1]:
        shared = shared_tokens(branch, tokens)
        goes_on = len(branch) > shared * TOKEN_BYTES
        if shared > furthest:
            furthest, leaves, followed = shared, goes_on, branch
        elif shared == furthest:
            leaves |= goes_on
    return furthest, leaves, followed
