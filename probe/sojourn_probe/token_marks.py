"""Where within a block two prompts part, and blocks of a server that hashes none, without any token in the record.

A mark is 32 bits of a keyed hash (BLAKE2b) of a token, all tokens before it in its block, and the block's hash before
that. Two sequences have the same marks as far as they are the same, and no further. Each process makes a key of its
own, which is never written, so marks and tokens cannot be matched outside of it.

All of this runs in the writing thread, in small portions, and takes at most one hundredth of a core: sequences beyond
that get no marks.
"""

import os
import time
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from struct import unpack

KEY_BYTES, BLOCK_BYTES, MARK_BYTES, TOKEN_BYTES = 32, 8, 4, 8
NS_A_TOKEN = 1_000  # that a mark takes, or a little less
SHARE = 0.01  # of a core
BURST_TOKENS = 20_000  # that may be marked at once after a pause
PORTION = 8  # blocks between two moments at which other threads may run
MOST_SEEN = 500_000  # blocks that are known to have marks; then all are forgotten, and marked again


class TokenMarks:
    """Owns the key, and which blocks have been marked."""

    def __init__(self, size: int):
        self._size = size  # tokens of a block
        key = os.urandom(KEY_BYTES)
        self._of_blocks = blake2b(key=key, digest_size=BLOCK_BYTES)
        self._of_tokens = blake2b(key=key, digest_size=MARK_BYTES)
        self._seen: set[bytes] = set()
        self._allowance_tokens = float(BURST_TOKENS)
        self._filled_ns = time.monotonic_ns()

    def block_hashes(self, salt: bytes, tokens: Sequence[int]) -> list[bytes]:
        """Of each full block, with all before it: for a server that hashes none."""
        size, digest, found = self._size, salt, []
        for begin in range(0, len(tokens) - size + 1, size):
            hasher = self._of_blocks.copy()
            hasher.update(digest)
            hasher.update(array("q", tokens[begin : begin + size]).tobytes())
            digest = hasher.digest()
            found.append(digest)
        return found

    def marks(
        self, salt: bytes, hashes: Sequence[bytes], tokens: Sequence[int], begin: int = 0
    ) -> tuple[int, list[int]]:
        """(place of the first marked token, marks) of a sequence from its first block that has none, not before
        `begin`; what is less than a block at its end always gets some. No marks where the allowance is used up.

        `hashes` are of its full blocks; `salt` separates sequences that share no blocks with equal tokens.
        """
        size = self._size
        block = begin // size
        while block < len(hashes) and hashes[block] in self._seen:
            block += 1
        first = block * size
        if first >= len(tokens) or not self._takes(len(tokens) - first):
            return first, []
        digests: list[bytes] = []
        for at in range(block, -(-len(tokens) // size)):
            hasher = self._of_tokens.copy()
            hasher.update(hashes[at - 1] if at else salt)
            for token in tokens[at * size : (at + 1) * size]:
                hasher.update(token.to_bytes(TOKEN_BYTES, "little"))
                digests.append(hasher.digest())
            if at % PORTION == 0:
                time.sleep(0)
        if len(self._seen) + len(hashes) > MOST_SEEN:
            self._seen.clear()
        self._seen.update(hashes[block:])
        return first, list(unpack(f">{len(digests)}I", b"".join(digests)))

    def _takes(self, count: int) -> bool:
        now_ns = time.monotonic_ns()
        gained = (now_ns - self._filled_ns) * SHARE / NS_A_TOKEN
        self._allowance_tokens = min(self._allowance_tokens + gained, BURST_TOKENS)
        self._filled_ns = now_ns
        if count > self._allowance_tokens:
            return False
        self._allowance_tokens -= count
        return True
