"""What the prefix cache of a foreign engine made of each prompt, from a probe's record of its blocks.

The outcomes are those of our own engine (`engine/memory/shadow/observer.py`). A block is known if it was stored since
the engine began, or since its cache was reset. Marks of tokens (`sojourn_probe.token_marks`) tell how far known
sequences go along with a prompt within a block.

1. `hit`: the engine's own count.
2. `miss_disabled`: known blocks of a request that may not read the cache, or of an engine without one.
3. `miss_evicted`: blocks behind the hits that were known and had been removed, and known ones behind those.
   `evicted_by` names the request whose allocation took their room.
4. `miss_sub_block`: tokens behind those that some known sequence had in the same place; and known blocks that were
   there and yet no hit, such as speculation drops.
5. `miss_diverged`: the rest, if at least one known block stands before it and some known sequence goes on otherwise at
   its first token; `miss_cold`: the rest else.

Without marks (the probe makes them for so many tokens a second) a prompt leaves a known one at the start of a block. A
block that another request computes now counts as known, since the engine lets others read it at once; so there is no
`miss_in_flight`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from struct import pack
from typing import Any, NamedTuple

import msgspec
import pandas as pd

from metrics.memory.block_uses import block_uses
from metrics.memory.branches import Branches, follow_branches, with_branch
from metrics.memory.known_prompts import TOKEN_BYTES
from metrics.memory.prefix_outcomes import RATIOS, PrefixReport
from metrics.probe.loop import Choice
from metrics.probe.stream import KvAllocated, KvAsked, KvMarks, KvRemoved, Stream
from metrics.records import KvEventRecord, RequestRecord


@dataclass(slots=True)
class KnownBlock:
    writer: int  # handle of the request that stored it first
    is_held: bool = True
    removed_by: int = 0  # the request that took its room; 0: nobody
    removed_ns: int = 0
    is_followed: bool = False  # some block is known behind it
    followed_by: Branches = None  # marks of what is known behind it


@dataclass(slots=True)
class PromptBlocks:
    """What is known of one request of the engine."""

    asked: KvAsked
    chain: list[int]  # its blocks, as far as they were full
    tail: bytes | None = None  # marks of what its prompt has behind its last full block
    report: PrefixReport | None = None  # None before its lookup


class Leaving(NamedTuple):
    """Where a prompt leaves what is known."""

    at: int  # token
    goes_on: bool  # some known sequence goes on otherwise there
    writer: int  # who had as much first; 0: nobody


class Prefixes:
    """Follows the blocks of one engine. `events` are what happened to blocks, in their order."""

    def __init__(self, choices: Mapping[int, Choice], *, caches: bool = True):
        self.prompts: dict[int, PromptBlocks] = {}
        self.events: list[KvEventRecord] = []
        self.block_size = 0
        self._choices, self._caches = choices, caches
        self._known: dict[int, KnownBlock] = {}
        self._root = KnownBlock(0)
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

    def fields(self, choice: Choice) -> dict[str, Any]:
        """Of the record of a request; none where it was never looked up."""
        prompt = self.prompts.get(choice.handle)
        if prompt is None or prompt.report is None:
            return {}
        usable = self._usable(choice)
        return msgspec.structs.asdict(prompt.report) | {
            "prompt_block_hashes": prompt.chain[:usable], "output_block_hashes": prompt.chain[usable:],
        }  # fmt: skip

    def _usable(self, choice: Choice) -> int:
        """Blocks of a prompt that a cache could have: its last token is always computed."""
        return max(choice.prompt_tokens - 1, 0) // self.block_size

    def _give_up(self, record: KvRemoved) -> None:
        if record.hashes is None:
            self._known.clear()
            self._root = KnownBlock(0)
            self.events.append(KvEventRecord(record.ns, "cleared"))
            return
        self._remove(record.hashes, 0, record.ns)
        self.events.append(KvEventRecord(record.ns, "removed", record.hashes))

    def _allocate(self, record: KvAllocated) -> None:
        choice, prompt = self._choices.get(record.handle), self.prompts.get(record.handle)
        if choice is not None and prompt is not None and prompt.report is None:
            prompt.report = self._report(choice, prompt, record.ns)
        name = None if choice is None else choice.name
        if record.removed:
            self._remove(record.removed, record.handle, record.ns)
            self.events.append(KvEventRecord(record.ns, "removed", record.removed, request=name))
        if record.stored:
            parent = self._store(record, prompt)
            if self._caches:
                stored = KvEventRecord(record.ns, "stored", record.stored, parent, self.block_size, request=name)
                self.events.append(stored)

    def _remove(self, blocks: Sequence[int], taker: int, now_ns: int) -> None:
        for block in blocks:
            if (node := self._known.get(block)) is not None:
                node.is_held, node.removed_by, node.removed_ns = False, taker, now_ns

    def _store(self, record: KvAllocated, prompt: PromptBlocks | None) -> int | None:
        """Returns the block before the first one."""
        chain = prompt.chain if prompt is not None else []
        parent = chain[record.begin - 1] if 0 < record.begin <= len(chain) else None
        if record.begin <= len(chain):
            chain[record.begin : record.begin + len(record.stored)] = record.stored
        above = self._root if parent is None else self._known.get(parent)
        for block in record.stored:
            node = self._known.setdefault(block, KnownBlock(record.handle))
            node.is_held, node.removed_by = True, 0
            if above is not None:
                above.is_followed = True
                self._branch(above, self._marks.get(block), record.handle)
            above = node
        return parent

    def _mark(self, record: KvMarks) -> None:
        """Cuts the marks into blocks. Those of an ended request are known from now on."""
        prompt, choice = self.prompts.get(record.handle), self._choices.get(record.handle)
        if prompt is None or not self.block_size:
            return
        size, count = self.block_size, len(record.marks)
        if record.is_end and choice is not None:
            count = min(count, max(choice.computed_until - record.begin, 0))
        packed = pack(f">{count}I", *record.marks[:count])
        for begin in range(0, count, size):
            place = (record.begin + begin) // size
            part = packed[begin * TOKEN_BYTES : (begin + size) * TOKEN_BYTES]
            is_full = len(part) == size * TOKEN_BYTES and place < len(prompt.chain)
            if is_full:
                self._marks.setdefault(prompt.chain[place], part)
            elif not record.is_end:
                prompt.tail = part
            if record.is_end and place <= len(prompt.chain):
                above = self._root if place == 0 else self._known.get(prompt.chain[place - 1])
                if above is not None:
                    self._branch(above, part, record.handle)

    def _branch(self, above: KnownBlock, marks: bytes | None, writer: int) -> None:
        if marks:
            above.followed_by = with_branch(above.followed_by, marks)
            self._writers.setdefault(marks, writer)

    def _report(self, choice: Choice, prompt: PromptBlocks, now_ns: int) -> PrefixReport:
        """At the lookup, before what the allocation itself removes and stores."""
        size, usable, reads = self.block_size, self._usable(choice), prompt.asked.reads
        nodes = list(self._leading(prompt.asked.hashes[:usable]))
        hit_tokens = min(choice.cached_tokens, choice.prompt_tokens)
        missed = nodes[hit_tokens // size :]
        lost = next((at for at, node in enumerate(missed) if not node.is_held), len(missed)) if reads else 0
        evicted = missed[lost:] if reads else []
        taken: dict[str, int] = {}
        for node in evicted:
            if not node.is_held and node.removed_by in self._choices:
                name = self._choices[node.removed_by].name
                taken[name] = taken.get(name, 0) + size
        known_tokens = max(len(nodes) * size, hit_tokens)
        leaving = self._leaving(choice, prompt, nodes, known_tokens)
        leaves = leaving.goes_on and 0 < leaving.at < choice.prompt_tokens
        outcomes = {
            "hit": hit_tokens,
            "miss_disabled": 0 if reads else len(missed) * size,
            "miss_evicted": len(evicted) * size,
            "miss_sub_block": lost * size + leaving.at - known_tokens,
            "miss_diverged" if leaves and nodes else "miss_cold": choice.prompt_tokens - leaving.at,
        }
        source = self._choices.get(leaving.writer)
        return PrefixReport(
            prefix_outcomes={outcome: tokens for outcome, tokens in outcomes.items() if tokens},
            infinite_hit_tokens=known_tokens,
            diverged_at=leaving.at if leaves else None,
            evicted_by=taken,
            evicted_ago_ns=now_ns - evicted[0].removed_ns if evicted and not evicted[0].is_held else None,
            resized_hit_tokens=[],
            prefix_source=None if source is None else source.name,
            prefix_shared_tokens=0 if source is None else leaving.at,
        )

    def _leading(self, hashes: Sequence[int]) -> Iterator[KnownBlock]:
        for block in hashes:
            if (node := self._known.get(block)) is None:
                return
            yield node

    def _leaving(self, choice: Choice, prompt: PromptBlocks, nodes: Sequence[KnownBlock], known_tokens: int) -> Leaving:
        """Within the block behind the known ones, by its marks; or at its beginning."""
        size, place, hashes = self.block_size, len(nodes), prompt.asked.hashes
        last = nodes[-1] if nodes else self._root
        if known_tokens > place * size:  # the engine had more, from elsewhere
            return Leaving(known_tokens, False, last.writer)
        own = self._marks.get(hashes[place]) if place < len(hashes) else prompt.tail
        if own is not None:
            shared, goes_on, branch = follow_branches(last.followed_by, own)
            writer = last.writer if branch is None else self._writers.get(branch, last.writer)
            return Leaving(min(known_tokens + shared, choice.prompt_tokens), goes_on, writer)
        if place < len(hashes) and (node := self._known.get(hashes[place])) is not None:  # a prompt that is known whole
            return Leaving(known_tokens + size, False, node.writer)
        ends = 0 < self._usable(choice) == place  # the rest is less than a block, which no cache could have
        return Leaving(choice.prompt_tokens if ends else known_tokens, last.is_followed, last.writer)


def prefixes_of(stream: Stream, choices: Mapping[int, Choice]) -> Prefixes:
    """Empty where the probe did not record blocks."""
    found = Prefixes(choices, caches=stream.start.settings.get("prefix_caching") is not False)
    for record in stream.kv:
        found.take(record)
    return found


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
