"""The places of n-grams in one sequence, and what followed the last occurrence of its newest tokens. Without torch.

Saxena, 2023, "Prompt Lookup Decoding"; Yang et al., 2023, "Inference with Reference", arXiv 2304.04487.
"""

from collections.abc import Sequence

SHORTEST = 2  # tokens of a match: one token alone says little about its successor
CANDIDATES = 16  # earlier places that are compared


class NgramIndex:
    """The places of each pair of tokens in one sequence, the latest first. A step costs O(its tokens)."""

    def __init__(self, longest: int):
        self._longest = longest
        self._size = min(SHORTEST, longest)  # of the n-grams that are indexed
        self._latest: dict[int, int] = {}  # n-gram → position behind its latest place
        self._earlier: list[int] = []  # of each position: that behind the place before it of the same n-gram; -1: none
        self.token_ids: list[int] = []

    def extend(self, token_ids: Sequence[int]) -> None:
        """The sequence goes on. The n-gram at its end is indexed once a token follows it."""
        known, latest, earlier, size = self.token_ids, self._latest, self._earlier, self._size
        begin = len(earlier)
        known += token_ids
        for end in range(begin, len(known)):
            if end < size:
                earlier.append(-1)
                continue
            key = known[end - 1] if size == 1 else known[end - 2] << 32 | known[end - 1]
            earlier.append(latest.get(key, -1))
            latest[key] = end

    def continuation(self, count: int) -> list[int]:
        """Up to `count` tokens that followed the longest match of the sequence's end, the latest of equals; [] without
        one."""
        known, size = self.token_ids, self._size
        last = len(known)
        if last < size:
            return []
        place = self._latest.get(known[-1] if size == 1 else known[-2] << 32 | known[-1], -1)
        best, longest = -1, size - 1
        for _ in range(CANDIDATES):
            if place < 0 or longest >= self._longest:
                break
            length = size
            while length < min(self._longest, place) and known[place - 1 - length] == known[last - 1 - length]:
                length += 1
            if length > longest:
                best, longest = place, length
            place = self._earlier[place]
        if best < 0:
            return []
        found = known[best : best + count]
        while len(found) < count:  # a repetition goes on by itself: a b a b → a b a b
            found.append(found[best - last])
        return found


def lookup_steps(token_ids: Sequence[int], prompt_tokens: int, *, drafts: int = 4, longest: int = 4) -> int:
    """Steps that would have given the output of a finished request, had each verified up to `drafts` tokens of prompt
    lookup. Without any accepted draft they are as many as its output tokens."""
    index, steps, known = NgramIndex(longest), 0, prompt_tokens
    index.extend(token_ids[:prompt_tokens])
    while known < len(token_ids):
        accepted = 0
        for draft in index.continuation(drafts) if steps else ():  # the first token is that of the prompt's step
            if known + accepted + 1 >= len(token_ids) or draft != token_ids[known + accepted]:
                break
            accepted += 1
        index.extend(token_ids[known : known + accepted + 1])
        known += accepted + 1
        steps += 1
    return steps
