"""What the prefix cache of a foreign engine made of each prompt, from a probe's record of its blocks.

The outcomes are those of `metrics/memory/prefix_outcomes.py`. A block is known if it was stored since the engine began,
or since its cache was reset. Marks of tokens (`sojourn_probe.token_marks`) tell how far known sequences go along with a
prompt within a block. `hit` is the engine's own count. Known blocks that were there and yet no hit, such as speculation
drops, are `miss_sub_block`.

Without marks (the probe makes them for so many tokens a second) a prompt leaves a known one at the start of a block. A
block that another request computes now counts as known, since the engine lets others read it at once; so there is no
`miss_in_flight`.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from struct import pack
from typing import Any, NamedTuple

import msgspec
import pandas as pd

from sojourn.interop.probe.records import KvAllocated, KvAsked, KvMarks, KvRemoved
from sojourn.metrics.memory.block_uses import block_uses
from sojourn.metrics.memory.branches import TAILS, Branches, follow_branches, with_branch, without_branch
from sojourn.metrics.memory.known_prompts import TOKEN_BYTES
from sojourn.metrics.memory.prefix_outcomes import RATIOS, PrefixReport
from sojourn.metrics.records import KvEventRecord, RequestRecord

REMEMBERED = 1_048_576  # known blocks, of some 600 bytes with their marks; of removed ones the oldest go first


class KnownBlock(msgspec.Struct, gc=False, eq=False):
    writer: int  # handle of the request that stored it first
    parent: int | None  # the block before it
    is_held: bool = True
    removed_by: int = 0  # the request that took its room; 0: nobody
    removed_ns: int = 0
    is_followed: bool = False  # some block is known behind it
    followed_by: Branches = None  # marks of what is known behind it
    tails: tuple[bytes, ...] = ()  # of these, ends of sequences, oldest first


class Lost(NamedTuple):
    """A known block of a prompt that was not there at its lookup."""

    place: int
    taker: int
    removed_ns: int


class Lookup(NamedTuple):
    """What was known of a prompt when it got its first blocks."""

    ns: int
    known: int  # leading blocks, of those that a cache could have
    lost: list[Lost]
    left_at: int  # the token at which it leaves what is known
    goes_on: bool  # some known sequence goes on otherwise there
    source: int  # the request that had as much first; 0: nobody


class PromptBlocks(msgspec.Struct):
    """What is known of one request of the engine."""

    asked: KvAsked
    chain: list[int]  # its blocks, as far as they were full
    tail: bytes | None = None  # marks of what its prompt has behind its last full block
    lookup: Lookup | None = None

    @property
    def reusable(self) -> int:
        """Blocks of its prompt that a cache could have: the last token is always computed."""
        return max(self.asked.prompt_tokens - 1, 0) // self.asked.block_size


class Prefixes:
    """Follows the blocks of one engine, record by record."""

    def __init__(self) -> None:
        self.block_size = 0
        self.caches = True  # the engine has a cache
        self.prompts: dict[int, PromptBlocks] = {}  # by handle
        self._events: list[tuple[int, KvEventRecord]] = []  # with the handle of the request
        self._known: dict[int, KnownBlock] = {}  # those that were removed last stand at the end
        self._root = KnownBlock(0, None)
        self._marks: dict[int, bytes] = {}  # block → marks of its tokens
        self._writers: dict[bytes, int] = {}  # marks of a branch → who had it first

    def take(self, record: KvAsked | KvAllocated | KvMarks | KvRemoved) -> None:
        match record:
            case KvAsked():
                self.block_size = record.block_size
                self.prompts[record.handle] = PromptBlocks(record, list(record.hashes))
            case KvMarks():
                self._mark(record)
            case KvAllocated():
                self._allocate(record)
            case KvRemoved():
                self._give_up(record)

    def forget(self, handles: Collection[int], begin_ns: int) -> None:
        """Drops prompts of other requests, and what happened before."""
        self.prompts = {handle: prompt for handle, prompt in self.prompts.items() if handle in handles}
        self._events = [each for each in self._events if each[1].ns >= begin_ns]

    def events_of(self, names: Mapping[int, str]) -> list[KvEventRecord]:
        """What happened to blocks, in order; `names` of the handles."""
        return [
            msgspec.structs.replace(event, request=names[handle]) if handle in names else event
            for handle, event in self._events
        ]

    def fields(self, handle: int, cached_tokens: int, names: Mapping[int, str]) -> dict[str, Any]:
        """Of the record of a request, whose lookup found so many tokens; none where it was never looked up."""
        prompt = self.prompts.get(handle)
        if prompt is None or prompt.lookup is None:
            return {}
        report = _report(prompt, prompt.lookup, min(cached_tokens, prompt.asked.prompt_tokens), names)
        return msgspec.structs.asdict(report) | {
            "prompt_block_hashes": prompt.chain[: prompt.reusable],
            "output_block_hashes": prompt.chain[prompt.reusable :],
        }

    def _give_up(self, record: KvRemoved) -> None:
        if record.hashes is None:
            self._known.clear()
            self._writers.clear()
            self._root = KnownBlock(0, None)
            self._events.append((0, KvEventRecord(record.ns, "cleared")))
            return
        self._remove(record.hashes, 0, record.ns)
        self._events.append((0, KvEventRecord(record.ns, "removed", record.hashes)))

    def _allocate(self, record: KvAllocated) -> None:
        prompt = self.prompts.get(record.handle)
        if prompt is not None and prompt.lookup is None:
            prompt.lookup = self._look_up(prompt, record.ns)
        if record.removed:
            self._remove(record.removed, record.handle, record.ns)
            self._events.append((record.handle, KvEventRecord(record.ns, "removed", record.removed)))
        if record.stored:
            parent = self._store(record, prompt)
            if self.caches:
                stored = KvEventRecord(record.ns, "stored", record.stored, parent, self.block_size)
                self._events.append((record.handle, stored))

    def _remove(self, blocks: Sequence[int], taker: int, now_ns: int) -> None:
        for block in blocks:
            if (node := self._known.pop(block, None)) is not None:
                node.is_held, node.removed_by, node.removed_ns = False, taker, now_ns
                self._known[block] = node

    def _store(self, record: KvAllocated, prompt: PromptBlocks | None) -> int | None:
        """Returns the block before the first one."""
        chain = prompt.chain if prompt is not None else []
        parent = chain[record.begin - 1] if 0 < record.begin <= len(chain) else None
        if record.begin <= len(chain):
            chain[record.begin : record.begin + len(record.stored)] = record.stored
        place, above = parent, self._node(parent)
        for block in record.stored:
            node = self._known.get(block)
            if node is None:
                self._make_room()
                node = self._known[block] = KnownBlock(record.handle, place)
            node.is_held, node.removed_by = True, 0
            if above is not None:
                above.is_followed = True
                self._branch(above, self._marks.get(block), record.handle)
            place, above = block, node
        return parent

    def _node(self, block: int | None) -> KnownBlock | None:
        return self._root if block is None else self._known.get(block)

    def _make_room(self) -> None:
        """Drops the blocks that were removed longest ago, where there are too many."""
        for _ in range(len(self._known) - REMEMBERED + 1):
            block = next(iter(self._known))
            node = self._known.pop(block)
            if node.is_held:
                self._known[block] = node
                continue
            marks, above = self._marks.pop(block, b""), self._node(node.parent)
            if above is not None:
                self._cut(above, marks)
            for tail in node.tails:
                self._writers.pop(tail, None)

    def _mark(self, record: KvMarks) -> None:
        """Marks of a prompt are known once its blocks are stored; those of an ended request from now on."""
        prompt = self.prompts.get(record.handle)
        if prompt is None or not self.block_size:
            return
        width = self.block_size * TOKEN_BYTES
        packed = pack(f">{len(record.marks)}I", *record.marks)
        for number, at in enumerate(range(0, len(packed), width)):
            place, part = record.begin // self.block_size + number, packed[at : at + width]
            above = self._node(prompt.chain[place - 1] if place else None) if place <= len(prompt.chain) else None
            if len(part) == width and place < len(prompt.chain):
                self._marks.setdefault(prompt.chain[place], part)
                while len(self._marks) > 2 * REMEMBERED:  # of prompts that were never computed
                    del self._marks[next(iter(self._marks))]
                if record.is_end and above is not None and prompt.chain[place] in self._known:
                    self._branch(above, part, record.handle)
            elif not record.is_end:
                prompt.tail = part
            elif above is not None and part not in above.tails:
                self._end(above, part, record.handle)

    def _branch(self, above: KnownBlock, marks: bytes | None, writer: int) -> None:
        if marks:
            above.followed_by = with_branch(above.followed_by, marks)
            self._writers.setdefault(marks, writer)

    def _end(self, above: KnownBlock, tail: bytes, writer: int) -> None:
        """A sequence ended behind a block with less than a block."""
        if len(above.tails) == TAILS:
            self._cut(above, above.tails[0])
        above.tails = (*above.tails[1 - TAILS :], tail)
        self._branch(above, tail, writer)

    def _cut(self, above: KnownBlock, marks: bytes) -> None:
        if marks and self._writers.pop(marks, None) is not None:
            above.followed_by = without_branch(above.followed_by, marks)

    def _look_up(self, prompt: PromptBlocks, now_ns: int) -> Lookup:
        """Before what the allocation itself removes and stores."""
        nodes = list(self._leading(prompt.asked.hashes[: prompt.reusable]))
        lost = [
            Lost(place, node.removed_by, node.removed_ns) for place, node in enumerate(nodes) if not node.is_held
        ]  # fmt: skip
        return Lookup(now_ns, len(nodes), lost, *self._leaving(prompt, nodes))

    def _leading(self, hashes: Sequence[int]) -> Iterator[KnownBlock]:
        for block in hashes:
            if (node := self._known.get(block)) is None:
                return
            yield node

    def _leaving(self, prompt: PromptBlocks, nodes: Sequence[KnownBlock]) -> tuple[int, bool, int]:
        """Where a prompt leaves what is known: within the block behind the known ones, by its marks; or at its
        beginning."""
        place, hashes = len(nodes), prompt.asked.hashes
        at, tokens = place * self.block_size, prompt.asked.prompt_tokens
        last = nodes[-1] if nodes else self._root
        own = self._marks.get(hashes[place]) if place < len(hashes) else prompt.tail
        if own is not None:
            shared, goes_on, branch = follow_branches(last.followed_by, own)
            return min(at + shared, tokens), goes_on, self._writers.get(branch or b"", last.writer)
        if place < len(hashes) and (node := self._known.get(hashes[place])) is not None:  # the last of a known prompt
            return at + self.block_size, False, node.writer
        if 0 < prompt.reusable == place:  # the rest is less than a block, which no cache could have
            return tokens, False, last.writer
        return at, last.is_followed, last.writer


def _report(prompt: PromptBlocks, found: Lookup, hit_tokens: int, names: Mapping[int, str]) -> PrefixReport:
    size, tokens, reads = prompt.asked.block_size, prompt.asked.prompt_tokens, prompt.asked.reads
    hit = hit_tokens // size
    lost = [each for each in found.lost if each.place >= hit] if reads else []
    first = lost[0].place if lost else max(found.known, hit)  # known blocks before it were there
    taken: dict[str, int] = {}
    for each in lost:
        if each.taker in names:
            taken[names[each.taker]] = taken.get(names[each.taker], 0) + size
    known_tokens = max(found.known * size, hit_tokens)
    left_at = max(found.left_at, known_tokens)  # the engine may have more, from elsewhere
    leaves = found.goes_on and left_at == found.left_at and 0 < left_at < tokens
    outcomes = {
        "hit": hit_tokens,
        "miss_disabled": 0 if reads else known_tokens - hit_tokens,
        "miss_evicted": (found.known - first) * size if lost else 0,
        "miss_sub_block": (first * size - hit_tokens if reads and first > hit else 0) + left_at - known_tokens,
        "miss_diverged" if leaves and found.known else "miss_cold": tokens - left_at,
    }
    return PrefixReport(
        prefix_outcomes={outcome: count for outcome, count in outcomes.items() if count},
        infinite_hit_tokens=known_tokens,
        diverged_at=left_at if leaves else None,
        evicted_by=taken,
        evicted_ago_ns=found.ns - lost[0].removed_ns if lost else None,
        resized_hit_tokens=[],
        prefix_source=names.get(found.source),
        prefix_shared_tokens=left_at if found.source else 0,
    )


def with_resized_hits(records: Sequence[RequestRecord], block_size: int, pool_blocks: int) -> list[RequestRecord]:
    """The records with what pools of RATIOS this size would have hit, by the reuse distances of their blocks."""
    asked = [record for record in records if record.prefix_outcomes]
    if not asked or not pool_blocks:
        return list(records)
    frame = pd.DataFrame(
        [{name: getattr(record, name) for name in _OF_USES} for record in asked], columns=list(_OF_USES)
    )  # fmt: skip
    uses = block_uses(frame, block_size)
    if uses is None:
        return list(records)
    hits = [uses.hits(int(ratio * pool_blocks)).astype(int).tolist() for ratio in RATIOS]
    resized = dict(zip(uses.request_ids, map(list, zip(*hits, strict=True)), strict=True))
    return [
        msgspec.structs.replace(record, resized_hit_tokens=resized[record.request_id])
        if record.request_id in resized
        else record
        for record in records
    ]


_OF_USES = (
    "request_id", "scheduled_ns", "finished_ns", "token_ns", "prompt_tokens", "cached_tokens", "computed_tokens",
    "prompt_block_hashes", "output_block_hashes", "prefix_outcomes", "infinite_hit_tokens",
)  # fmt: skip
