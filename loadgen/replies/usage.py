"""What a server's `usage` says of a stream's tokens: believed where it agrees with the chunks of text, else unknown.

Servers send the total once, at the end; with every chunk the total so far; or with every chunk its own tokens.
Some send zeros until the end, or at the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

# By how much chunks with text and tokens differ where each chunk is a token: a text that was held back to the end, name
# and arguments of a tool, an end token without text.
SPARE_CHUNKS = 2
SPARE_SHARE = 0.1

REPORTED, ESTIMATED, ONE_EACH = "reported", "estimated", "one each"


@dataclass(frozen=True, slots=True)
class Tokens:
    """`of_chunks` is empty where each chunk stands for one token. `source`: how the tokens of a chunk were counted.
    `doubt`: why a total that the server told is not believed; "" otherwise."""

    total: int | None
    of_chunks: list[int]
    source: str
    doubt: str = ""


def counted(told: Sequence[int | None], last: int | None, sizes: Sequence[int]) -> Tokens:
    """`told`: the output tokens of the usage beside each chunk with text; `last`: of a usage after all text;
    `sizes`: bytes of each chunk's text, by which a total is spread over chunks where it alone is told."""
    if not sizes:
        return Tokens(last, [], REPORTED)
    known = [value or None for value in told]  # text has come, so 0 is no count
    ended, zero = bool(last), last == 0 or 0 in told
    last = last or known[-1]
    if all(known):
        if _runs(known) and last >= known[-1]:
            new = [after - before for before, after in pairwise([0, *known])]
            return Tokens(last, new, REPORTED)
        if _is_of_each_chunk(known, last):
            return Tokens(sum(known), known, REPORTED)
    values = [value for value in known if value is not None]
    if last is None and not values:
        return Tokens(None, [], ONE_EACH, "usage counts no output token beside text" if zero else "")
    contradiction = _contradiction(values, last, len(sizes), ended)
    return Tokens(None, [], ONE_EACH, contradiction) if contradiction else _of_total(last, sizes)


def _contradiction(values: list[int], last: int | None, chunks: int, ended: bool) -> str:
    """What cannot be true of the counts beside chunks and the last one; "" where they agree."""
    if last is None:
        return f"usage counts {values[-1]} output tokens, and text came after it"
    if any(value > last for value in values):
        return f"usage counts {max(values)} output tokens in a chunk and {last} at the end"
    if chunks > 1 and len(values) == chunks and not ended:
        return f"usage counts {last} output tokens with each of {chunks} chunks"
    if chunks > last + _spare(last):
        return f"usage counts {last} output tokens, and {chunks} chunks of text came"
    return ""


def _spare(tokens: int) -> float:
    """How many chunks more or less than tokens are no contradiction."""
    return max(SPARE_CHUNKS, SPARE_SHARE * tokens)


def _of_total(tokens: int, sizes: Sequence[int]) -> Tokens:
    chunks, spare = len(sizes), _spare(tokens)
    if chunks == 1:
        return Tokens(tokens, [tokens], REPORTED)
    if tokens <= chunks + (spare if chunks > spare else 0):
        return Tokens(tokens, [], ONE_EACH)
    return Tokens(tokens, spread(tokens, sizes), ESTIMATED)


def _runs(known: Sequence[int]) -> bool:
    """Whether the counts are totals so far: they never fall, and grow with the chunks. A constant is none."""
    grows = all(before <= after for before, after in pairwise(known))
    return grows and known[-1] >= len(known) - SPARE_CHUNKS and (len(known) == 1 or known[-1] > known[0])


def _is_of_each_chunk(known: Sequence[int], last: int | None) -> bool:
    """Whether the counts are those of each chunk: their sum is the last count, or no other reading is possible."""
    total = sum(known)
    if last == total:
        return True
    fits_no_total = max(known) < len(known) - SPARE_CHUNKS or any(before > after for before, after in pairwise(known))
    return fits_no_total and (last is None or last == known[-1])


def spread(total: int, sizes: Sequence[int]) -> list[int]:
    """`total` tokens over chunks, one each at least, the others in proportion to the size of their text."""
    spare, whole = total - len(sizes), sum(sizes)
    ends = [round(spare * reached / whole) for reached in accumulate(sizes)]
    return [1 + end - begin for begin, end in pairwise([0, *ends])]
