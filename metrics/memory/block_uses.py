"""How far back each block of a prompt was used last, from the records of requests: the reuse distances of a run.

A request's record names the blocks of its prompt and of its output by hashes. So all lookups are known, and with them
what pools of any size would have held (Mattson et al., IBM Systems Journal 9, 1970). As in the engine's own shadow
index (engine/memory/shadow), blocks that running requests hold are on top whatever their age; a block counts as used
when its last reader leaves; within a sequence the last block ages first. The distance of a block is the number of other
blocks that are held then, or that were given back after it: a pool with more blocks than that still has it.

Whoever reads a block reads all before it. So the blocks that a sequence gives back stay one entry of the stack, which
loses blocks at its beginning only, and nothing has to be sampled.

A block that is not full when its request ends is of no use to others. It takes room all the same, until a later
request gets it before any cached block. Such blocks count, too.

Approximates: requests run together as they did, whatever the pool; a block that a server computes twice counts once.
Cannot tell: policies that evict others than the block used last longest ago.
"""

from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from sojourn.metrics.memory.lru_stack import LruStack
from sojourn.metrics.memory.prefix_outcomes import hit_tokens

UNKNOWN = 1 << 62  # distance of a block of which no use was recorded
COLUMNS = ("request_id", "scheduled_ns", "prompt_block_hashes", "output_block_hashes", "prefix_outcomes")
_GROW, _RELEASE, _LOOK_UP = range(3)  # at one moment in this order


@dataclass(frozen=True, slots=True)
class BlockUses:
    """The lookups of a run, in their order; and each block that an infinite cache would have hit."""

    request_ids: list[str]
    ns: np.ndarray  # [lookups]
    queried_tokens: np.ndarray  # [lookups]
    hit_tokens: np.ndarray  # [lookups] that the server found
    infinite_tokens: np.ndarray  # [lookups] that a cache without eviction would have found
    lookup: np.ndarray  # [blocks] place of its lookup
    distance: np.ndarray  # [blocks] UNKNOWN where its last use is not recorded
    idle_ns: np.ndarray  # [blocks] since its last reader left; 0 of a block that is held, -1 where that is not known
    made: int  # different blocks that prompts and outputs have
    reads: np.ndarray  # [blocks that were read] how often each was found by a later prompt
    block_size: int

    def only(self, counted: Collection[str]) -> "BlockUses":
        """The same of these requests alone; what the others did to the cache stays."""
        chosen = np.array([name in counted for name in self.request_ids], bool)
        blocks = chosen[self.lookup]
        place = np.cumsum(chosen) - 1
        return replace(
            self, request_ids=[name for name in self.request_ids if name in counted], ns=self.ns[chosen],
            queried_tokens=self.queried_tokens[chosen], hit_tokens=self.hit_tokens[chosen],
            infinite_tokens=self.infinite_tokens[chosen], lookup=place[self.lookup[blocks]],
            distance=self.distance[blocks], idle_ns=self.idle_ns[blocks],
        )  # fmt: skip

    def hits(self, blocks: float) -> np.ndarray:
        """[lookups] tokens that a pool of so many blocks would have hit."""
        return np.bincount(self.lookup[self.distance < blocks], minlength=len(self.ns)) * self.block_size

    def hit_ratio(self, blocks: float) -> float:
        return float(self.hits(blocks).sum() / self.queried_tokens.sum())

    @property
    def measured_ratio(self) -> float:
        return float(self.hit_tokens.sum() / self.queried_tokens.sum())

    @property
    def infinite_ratio(self) -> float:
        return float(self.infinite_tokens.sum() / self.queried_tokens.sum())

    def blocks_for(self, share: float) -> int | None:
        """The smallest pool that hits this share of what an infinite cache does; None where no distance tells."""
        known = np.sort(self.distance[self.distance < UNKNOWN])
        place = int(np.ceil(share * len(self.distance))) - 1
        return int(known[place]) + 1 if 0 <= place < len(known) else None


@dataclass(frozen=True, slots=True)
class _Request:
    prompt: list[int]
    blocks: list[int]  # that it computed or read, prompt and output
    known: int  # of the prompt, that an infinite cache would have had
    hits: int  # tokens of the prompt that this cache had


def block_uses(requests: pd.DataFrame, block_size: int) -> BlockUses | None:
    """Of `requests.parquet`, or of client and server joined: all that ran, the warm-up too. None where no request was
    looked up, or the server recorded no hashes."""
    if not {*COLUMNS, "infinite_hit_tokens"} <= set(requests.columns) or block_size <= 0:
        return None
    rows = _looked_up(requests)
    if not len(rows) or not any(len(cell) for cell in rows.prompt_block_hashes):
        return None
    found = [_request(row, block_size) for row in rows.itertuples(index=False)]
    lookup, distance, idle_ns = _distances(sorted(_moments(rows, found, block_size)), found)
    reads = Counter(block for each in found for block in each.prompt[: each.known])
    outcomes = list(rows.prefix_outcomes)
    return BlockUses(
        request_ids=rows.request_id.tolist(),
        ns=rows.scheduled_ns.astype("int64").to_numpy(),
        queried_tokens=np.array([sum(cell.values()) for cell in outcomes], float),
        hit_tokens=np.array([hit_tokens(cell) for cell in outcomes], float),
        infinite_tokens=rows.infinite_hit_tokens.astype("float64").fillna(0).to_numpy(),
        lookup=lookup,
        distance=distance,
        idle_ns=idle_ns,
        made=len({block for each in found for block in each.blocks}),
        reads=np.array(list(reads.values()), int),
        block_size=block_size,
    )


def releases(requests: pd.DataFrame, block_size: int) -> Iterator[tuple[int, list[int]]]:
    """(ns, blocks) of each request that gave its blocks back."""
    rows = _looked_up(requests)
    for row in rows.itertuples(index=False):
        yield _end_ns(row), _request(row, block_size).blocks


def _looked_up(requests: pd.DataFrame) -> pd.DataFrame:
    """The rows that asked the cache, in order of their lookups."""
    rows = requests[requests.scheduled_ns.notna() & requests.prompt_block_hashes.notna()]
    rows = rows[np.array([isinstance(cell, dict) and bool(cell) for cell in rows.prefix_outcomes], bool)]
    return rows.iloc[np.argsort(rows.scheduled_ns.astype("int64").to_numpy(), kind="stable")]


def _end_ns(row) -> int:
    tokens = _list(row.token_ns)
    return max(int(row.scheduled_ns) + 1, tokens[-1] if tokens else int(row.finished_ns))


def _request(row, block_size: int) -> _Request:
    prompt, output = list(row.prompt_block_hashes), _list(row.output_block_hashes)
    computed = (_whole(_server(row, "cached_tokens")) + _whole(row.computed_tokens)) // block_size
    known = min(_whole(row.infinite_hit_tokens) // block_size, len(prompt))
    hits = int(hit_tokens(row.prefix_outcomes)) // block_size
    return _Request(prompt, [*prompt, *output][:computed], known, hits)


class _Order:
    """The idle blocks, in the sequences that gave them back; and how many requests hold each of the others."""

    def __init__(self) -> None:
        self.readers: dict[int, int] = {}
        self._sequences = LruStack()
        self._place: dict[int, tuple[int, int]] = {}  # block → its sequence, and its place there
        self._taken: dict[int, int] = {}  # of a sequence, blocks at its beginning that are held again
        self._since_ns: dict[int, int] = {}  # when it was given back
        self._last = 0

    def distances(self, blocks: Sequence[int], held: int, now_ns: int) -> Iterator[tuple[int, int]]:
        """(distance, ns without a reader) of blocks of one prompt from its beginning on, with so many held ones."""
        sequence, offset, idle_ns = None, 0, 0
        for block in blocks:
            if block in self.readers:
                yield 0, 0
            elif (place := self._place.get(block)) is None:
                yield UNKNOWN, -1
            else:
                if place[0] != sequence:
                    sequence = place[0]
                    offset = held + self._sequences.above(sequence) - self._taken.get(sequence, 0)
                    idle_ns = now_ns - self._since_ns[sequence]
                yield offset + place[1], idle_ns

    def read(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.readers[block] = self.readers.get(block, 0) + 1
            if (place := self._place.pop(block, None)) is not None:
                self._taken[place[0]] = self._taken.get(place[0], 0) + 1
                self._sequences.shrink(place[0], 1)
                if place[0] not in self._sequences:
                    del self._taken[place[0]], self._since_ns[place[0]]

    def leave(self, blocks: Sequence[int], computed: int, now_ns: int) -> None:
        """A request gives its blocks back. Those from `computed` on were never full."""
        idle = []
        for at, block in enumerate(blocks):
            self.readers[block] -= 1
            if not self.readers[block]:
                del self.readers[block]
                if at < computed:
                    idle.append(block)
        if idle:
            self._last += 1
            self._sequences.push(self._last, len(idle))
            self._since_ns[self._last] = now_ns
            for at, block in enumerate(idle):
                self._place[block] = self._last, at


def _distances(
    moments: Sequence[tuple[int, int, int, int]], found: list[_Request]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each known block of a prompt: the place of the request, the distance, and ns without a reader."""
    order, running, spare = _Order(), 0, 0  # spare: free blocks that hold nothing known
    lookups, distances, idle = array("q"), array("q"), array("q")
    for now_ns, kind, place, at in moments:
        request = found[place]
        if kind == _LOOK_UP:
            held = len(order.readers) + running + spare
            for distance, idle_ns in order.distances(request.prompt[: request.known], held, now_ns):
                distances.append(distance)
                idle.append(idle_ns)
            lookups.extend([place] * request.known)
            order.read(request.prompt)
            running += 1
            spare = max(0, spare - (len(request.prompt) - request.hits) - 1)
        elif kind == _GROW:
            order.read([request.blocks[at]])
            spare = max(0, spare - 1)
        else:
            running -= 1
            spare += 1
            computed = max(len(request.blocks), request.known)
            order.leave([*request.prompt, *request.blocks[len(request.prompt) :]], computed, now_ns)
    return np.array(lookups, int), np.array(distances, int), np.array(idle, int)


def _moments(rows: pd.DataFrame, found: list[_Request], block_size: int) -> Iterator[tuple[int, int, int, int]]:
    """(ns, what, place of the request, place of the block): it is looked up, its output fills blocks, it leaves."""
    prompts = _server_column(rows, "prompt_tokens")
    for place, (row, request) in enumerate(zip(rows.itertuples(index=False), found, strict=True)):
        tokens = _list(row.token_ns)
        begin_ns = int(row.scheduled_ns)
        end_ns = _end_ns(row)
        yield begin_ns, _LOOK_UP, place, 0
        for at in range(len(request.prompt), len(request.blocks)):
            output = (at + 1) * block_size - prompts[place] - 1  # the token behind which the block is full
            filled_ns = tokens[output] if 0 <= output < len(tokens) else end_ns - 1
            yield min(max(filled_ns, begin_ns + 1), end_ns - 1), _GROW, place, at
        yield end_ns, _RELEASE, place, 0


def _server_column(rows: pd.DataFrame, name: str) -> list[int]:
    column = rows[f"server_{name}"] if f"server_{name}" in rows else rows[name]
    return column.astype("float64").fillna(0).astype(int).tolist()


def _server(row, name: str) -> object:
    return getattr(row, f"server_{name}", getattr(row, name, None))


def _list(value: object) -> list[int]:
    return [] if value is None or isinstance(value, float) else list(value)  # type: ignore[call-overload]


def _whole(count: object) -> int:
    return 0 if count is None or pd.isna(count) else int(count)  # type: ignore[call-overload]
