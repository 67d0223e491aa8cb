"""The requests of a trace as a fleet gets them: columns, and the hashes of their blocks instead of token ids."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sojourn.metrics.errors import ReplayError

OWN = 1 << 62  # from here on: numbers of blocks that no other request has
OF_A_TRACE = bytes(8)  # behind the number of a block: an engine's hashes have 16 bytes
COPY_SHIFT = 36  # a copy's blocks are other ones than those of the trace


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One line of a trace. `block_ids` name its prompt's blocks of one size: equal ids at equal places, behind equal
    ones, are equal tokens. They may be missing."""

    offset_s: float
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    session: str = ""


class FleetTraffic:
    """`num_requests` of a trace, at `rate` requests per second.

    A fleet larger than the traced one gets several copies of its traffic at the same time, each from another moment of
    the trace on, with prompts of its own. Requests are numbers from 0 on, in order of `due_ns` [num_requests].
    """

    def __init__(self, rows: Sequence[TracedRequest], num_requests: int, rate: float | None, block_size: int) -> None:
        """Without a rate each copy has the trace's own. Raises ReplayError for requests of one moment."""
        offsets = np.array([row.offset_s for row in rows])
        offsets -= offsets.min()
        copies = -(-num_requests // len(rows))
        if (span := float(offsets.max()) * len(rows) / max(1, len(rows) - 1)) <= 0:
            raise ReplayError("all requests of the trace have the same moment, so it has no rate; give a longer one")
        shifts = np.arange(copies) * span / copies
        due_s = ((offsets[None, :] + shifts[:, None]) % span).ravel()
        order = np.argsort(due_s, kind="stable")[:num_requests]
        due_s = due_s[order] - due_s[order[0]]
        last_s = float(due_s[-1])
        if last_s <= 0 and num_requests > 1:
            raise ReplayError(f"the first {num_requests} requests have the same moment, and so no rate; take more")
        own_rate = (num_requests - 1) / last_s if last_s > 0 else copies * len(rows) / span
        self.rate = own_rate if rate is None else rate
        self.due_ns = due_s * (own_rate / self.rate) * 1e9
        self.copies, self._rows = np.divmod(order, len(rows))
        self.prompt_tokens = np.array([row.prompt_tokens for row in rows])[self._rows]
        self.output_tokens = np.array([max(1, row.output_tokens) for row in rows])[self._rows]
        self._block_size = block_size
        self._blocks = _numbered([row.block_ids[: row.prompt_tokens // block_size] for row in rows])
        self._sessions = _sessions(rows, self._blocks)

    def __len__(self) -> int:
        return len(self.due_ns)

    def session(self, request: int) -> bytes:
        """Of its conversation: the trace's name for it, else the first block behind what all prompts share."""
        copy = int(self.copies[request])
        return b"%d#%d" % (self._sessions[self._rows[request]], copy)

    def hashes(self, request: int) -> list[bytes]:
        """Of all blocks that it fills, those of its output included, 16 bytes each. What the trace does not name is its
        own."""
        size = self._block_size
        named = self._blocks[self._rows[request]]
        raw = (named + (int(self.copies[request]) << COPY_SHIFT)).tobytes()
        full = int(self.prompt_tokens[request] + self.output_tokens[request]) // size
        if (lacking := full - len(named)) > 0:
            raw += np.arange(OWN + (request << 20), OWN + (request << 20) + lacking).tobytes()
        return [raw[begin : begin + 8] + OF_A_TRACE for begin in range(0, 8 * full, 8)]

    def pooled_hit_tokens(self) -> int:
        """Prompt tokens that one cache of all replicas without eviction would hit."""
        size, total = self._block_size, 0
        order = np.argsort(self.copies, kind="stable")
        of_copies = np.split(order, np.flatnonzero(np.diff(self.copies[order])) + 1)
        for own in of_copies:
            known: set[int] = set()
            for row, prompt in zip(self._rows[own].tolist(), self.prompt_tokens[own].tolist(), strict=True):
                blocks = self._blocks[row].tolist()
                hit = 0
                while hit < len(blocks) and blocks[hit] in known:
                    hit += 1
                total += min(hit, (prompt - 1) // size) * size  # the last position is always computed
                known.update(blocks[hit:])
        return total


def _numbered(chains: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """The blocks of each chain by numbers that name all that stands before them, too."""
    numbers: dict[tuple[int, int], int] = {}
    found = []
    for chain in chains:
        above, own = -1, np.empty(len(chain), dtype=np.int64)
        for place, block in enumerate(chain):
            above = numbers.setdefault((above, block), len(numbers))
            own[place] = above
        found.append(own)
    return found


def _sessions(rows: Sequence[TracedRequest], blocks: Sequence[np.ndarray]) -> list[int]:
    names: dict[str, int] = {}
    common = 0
    while all(len(each) > common for each in blocks) and len({int(each[common]) for each in blocks}) == 1:
        common += 1
    found = []
    for place, (row, own) in enumerate(zip(rows, blocks, strict=True)):
        if row.session:
            found.append(OWN + names.setdefault(row.session, len(names)))
        else:
            found.append(int(own[common]) if len(own) > common else -1 - place)
    return found
