"""Prompts, and which of them shares the longest beginning with another one."""

from array import array
from bisect import bisect_left
from collections.abc import Sequence

TOKEN_BYTES = array("i").itemsize
SALT_BYTES = 16  # of a root's key, which is empty where there is no salt


class KnownPrompts:
    """Sorted by salt and tokens: among sorted strings, a neighbour shares most."""

    def __init__(self) -> None:
        self._prompts: list[tuple[bytes, str]] = []  # salt and packed tokens; request id

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, prompt: bytes, request_id: str) -> None:
        """`prompt` is of `salted`."""
        entry = (prompt, request_id)
        self._prompts.insert(bisect_left(self._prompts, entry), entry)

    def remove(self, prompt: bytes, request_id: str) -> None:
        at = bisect_left(self._prompts, (prompt, request_id))
        assert self._prompts[at] == (prompt, request_id), "a prompt is lost"
        del self._prompts[at]

    def longest_shared(self, prompt: bytes) -> tuple[int, str | None]:
        """The most tokens with which a prompt of the same salt and `prompt` begin, and the request that has it."""
        at = bisect_left(self._prompts, (prompt, ""))
        longest, source = 0, None
        for other, request_id in self._prompts[max(0, at - 1) : at + 1]:
            shared = shared_tokens(prompt, other) - SALT_BYTES // TOKEN_BYTES
            if shared > longest:
                longest, source = shared, request_id
        return longest, source


def salted(root_key: bytes, tokens: bytes) -> bytes:
    """Packed tokens behind the key of their salt's root."""
    return root_key.ljust(SALT_BYTES, b"\0") + tokens


def packed_tokens(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


def shared_tokens(one: bytes, other: bytes) -> int:
    """Tokens with which both begin. Halves are compared, since a loop over the bytes is slower."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low // TOKEN_BYTES
