"""Text that prompts repeat, at whatever place it stands: what a prefix cache would have if the prompt began with it.

A shingle is SHINGLE_TOKENS consecutive tokens (A. Broder, "On the resemblance and containment of documents", 1997).
The hashes of all shingles of earlier prompts are remembered in a table of a fixed size, where each has one place. A
token is repeated if it lies in a shingle that an earlier prompt had anywhere.

Prompts cut from one text overlap by chance, each pair at another place. A part that all prompts have, behind something
that changes, begins at the same token in all of them. So a repeated stretch counts as movable only if an earlier
stretch began with the same shingle; the first two prompts that have it do not count.
"""

import numpy as np

SHINGLE_TOKENS = 16
REMEMBERED_SHINGLES = 1 << 21  # 8 MiB
REMEMBERED_BEGINNINGS = 1 << 16
# A prompt takes 60 to 120 microseconds and 20 more for every 1000 tokens: so spaced they take 1% of a core.
NS_A_PROMPT, NS_A_TOKEN = 10_000_000, 10_000
BURST = 64  # prompts of any length
_MIX = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / the golden ratio, which is odd: no product loses a bit
_HALF = np.uint64(32)
# A stretch of twice the width is the first half times a factor plus the second.
_DOUBLINGS = [(1 << k, np.uint64(pow(int(_MIX), k + 2, 1 << 64))) for k in range(SHINGLE_TOKENS.bit_length() - 1)]


class Allowance:
    """Which prompts may be looked at, so that a server under load has better things to do for 99% of its time."""

    def __init__(self) -> None:
        self._free_ns = -(10**18)  # when all that was taken is paid for

    def takes(self, now_ns: int, num_tokens: int) -> bool:
        if self._free_ns > now_ns + (BURST - 1) * NS_A_PROMPT:
            return False
        self._free_ns = max(self._free_ns, now_ns) + max(NS_A_PROMPT, num_tokens * NS_A_TOKEN)
        return True


class PromptRepeats:
    """Remembers the shingles of prompts. Of equal hashes of 53 bits, different shingles are taken for the same."""

    def __init__(self, remembered: int = REMEMBERED_SHINGLES, beginnings: int = REMEMBERED_BEGINNINGS):
        """Both sizes are powers of two."""
        self._shingles = _Table(remembered)
        self._beginnings = _Table(beginnings)

    def add(self, tokens: np.ndarray, salt: int = 0, shared_tokens: int = 0) -> tuple[int, int]:
        """The repeated and the movable tokens of the prompt `tokens` [num_tokens], which is remembered from now on.

        Movable ones lie behind the first `shared_tokens`, which the prompt shares as a prefix. Prompts with different
        salts repeat nothing.
        """
        if len(tokens) < SHINGLE_TOKENS:
            return 0, 0
        hashes = shingle_hashes(tokens, salt)
        begins, ends = stretches(self._shingles.exchange(hashes))
        if not len(begins):
            return 0, 0
        repeated = int((ends - begins).sum())
        behind = ends > shared_tokens
        begins, ends = begins[behind], ends[behind]
        known = self._beginnings.exchange(hashes[begins])
        return repeated, int((ends - np.maximum(begins, shared_tokens))[known].sum())


class _Table:
    """A set of hashes of a fixed size."""

    def __init__(self, size: int):
        self._mask = np.uint64(size - 1)
        self._marks = np.zeros(size, np.uint32)  # the upper half of a hash; 0 where there is none

    def exchange(self, hashes: np.ndarray) -> np.ndarray:
        """Which of the hashes it holds; then it holds all of them."""
        places, marks = hashes & self._mask, (hashes >> _HALF).astype(np.uint32)
        held = self._marks[places] == marks
        self._marks[places] = marks
        return held


def shingle_hashes(tokens: np.ndarray, salt: int = 0) -> np.ndarray:
    """[num_tokens - SHINGLE_TOKENS + 1] hashes, each of the shingle that begins at its place."""
    hashes = tokens.astype(np.uint64)
    hashes += np.uint64(salt + 1)
    hashes *= _MIX
    hashes ^= hashes >> _HALF  # else shingles of the same sum would be alike
    for width, factor in _DOUBLINGS:
        hashes = hashes[:-width] * factor + hashes[width:]
    hashes ^= hashes >> _HALF
    hashes *= _MIX
    return hashes


def stretches(seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first tokens of the longest stretches that the shingles `seen` cover, and the tokens behind them."""
    places = np.flatnonzero(seen)
    if not len(places):
        return places, places
    apart = np.flatnonzero(np.diff(places) > SHINGLE_TOKENS)
    begins = places[np.concatenate([[0], apart + 1])]
    ends = places[np.concatenate([apart, [len(places) - 1]])] + SHINGLE_TOKENS
    return begins, ends
