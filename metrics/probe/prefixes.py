"""What the prefix cache of a foreign engine made of each prompt, from a probe's record of its blocks.

The outcomes are those of our own engine (`engine/memory/shadow/observer.py`), as far as whole blocks tell them: a block
is known if it was stored since the engine began, or since its cache was reset.

1. `hit`: the engine's own count.
2. `miss_evicted`: blocks behind it that were known and had been removed, and known ones behind those. `evicted_by`
   names the request whose allocation took their room. `miss_disabled`: known blocks of a request that may not read the
   cache.
3. `miss_sub_block`: what stands behind the last whole block, where all blocks are known that a cache could have; and
   known blocks that were there and yet no hit, such as speculation drops.
4. `miss_diverged`: the rest, if known blocks stand before it and another block is known to follow them. `miss_cold`:
   the rest else.

Cannot tell: a part of a block that is known. Prompts that leave a known one within a block leave it at the block's
beginning here, and `diverged_at` is up to a block too early. A block that another request computes at the moment counts
as known, since the engine lets others read it at once; so there is no `miss_in_flight`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pandas as pd

from metrics.memory.block_uses import block_uses
from metrics.memory.prefix_outcomes import RATIOS, PrefixReport
from metrics.probe.loop import Choice
from metrics.probe.stream import KvAllocated, KvAsked, KvRemoved, Stream
from metrics.records import KvEventRecord, RequestRecord


@dataclass(slots=True)
class KnownBlock:
    writer: int  # handle of the request that stored it first
    is_held: bool = True
    removed_by: int = 0  # the request that took its room; 0: nobody
    removed_ns: int = 0
    is_followed: bool = False  # some block is known behind it


@dataclass(slots=True)
class PromptBlocks:
    """What is known of one request of the engine."""

    asked: KvAsked
    chain: list[int]  # its blocks, as far as they were full
    report: PrefixReport | None = None  # None before its lookup


@dataclass(slots=True)
class Prefixes:
    """By handle. `events` are what happened to blocks, in their order."""

    prompts: dict[int, PromptBlocks] = field(default_factory=dict)
    events: list[KvEventRecord] = field(default_factory=list)
    block_size: int = 0

    def fields(self, choice: Choice) -> dict[str, Any]:
        """Of the record of a request; none where it was never looked up."""
        prompt = self.prompts.get(choice.handle)
        if prompt is None or prompt.report is None:
            return {}
        usable = self.reusable_blocks(choice)
        return msgspec.structs.asdict(prompt.report) | {
            "prompt_block_hashes": prompt.chain[:usable], "output_block_hashes": prompt.chain[usable:],
        }  # fmt: skip

    def reusable_blocks(self, choice: Choice) -> int:
        """Of a prompt: its last token is always computed."""
        return max(choice.prompt_tokens - 1, 0) // self.block_size if self.block_size else 0


def prefixes_of(stream: Stream, choices: Mapping[int, Choice]) -> Prefixes:
    """Follows the blocks of one engine. Empty where its probe did not record them."""
    found = Prefixes()
    known: dict[int, KnownBlock] = {}
    for record in stream.kv:
        match record:
            case KvAsked():
                found.block_size = record.block_size
                found.prompts[record.handle] = PromptBlocks(record, list(record.hashes))
            case KvAllocated():
                _allocate(found, known, choices, record)
            case KvRemoved():
                if record.hashes is None:
                    known.clear()
                    found.events.append(KvEventRecord(record.ns, "cleared"))
                    continue
                for block in record.hashes:
                    _remove(known, block, 0, record.ns)
                found.events.append(KvEventRecord(record.ns, "removed", record.hashes))
    return found


def _allocate(
    found: Prefixes, known: dict[int, KnownBlock], choices: Mapping[int, Choice], record: KvAllocated
) -> None:
    choice, prompt = choices.get(record.handle), found.prompts.get(record.handle)
    if choice is not None and prompt is not None and prompt.report is None:
        prompt.report = _report(found, known, choices, choice, prompt, record.ns)
    name = None if choice is None else choice.name
    for block in record.removed:
        _remove(known, block, record.handle, record.ns)
    if record.removed:
        found.events.append(KvEventRecord(record.ns, "removed", record.removed, request=name))
    if not record.stored:
        return
    chain = prompt.chain if prompt is not None else []
    parent = chain[record.begin - 1] if 0 < record.begin <= len(chain) else None
    if record.begin <= len(chain):
        chain[record.begin : record.begin + len(record.stored)] = record.stored
    for block in record.stored:
        node = known.setdefault(block, KnownBlock(record.handle))
        node.is_held, node.removed_by = True, 0
    for above in [parent, *record.stored[:-1]]:
        if above is not None and (node := known.get(above)) is not None:
            node.is_followed = True
    found.events.append(
        KvEventRecord(record.ns, "stored", record.stored, parent, found.block_size, request=name)
    )  # fmt: skip


def _remove(known: dict[int, KnownBlock], block: int, taker: int, now_ns: int) -> None:
    if (node := known.get(block)) is not None:
        node.is_held, node.removed_by, node.removed_ns = False, taker, now_ns


def _report(
    found: Prefixes, known: Mapping[int, KnownBlock], choices: Mapping[int, Choice], choice: Choice,
    prompt: PromptBlocks, now_ns: int,
) -> PrefixReport:  # fmt: skip
    """At the lookup, before what the allocation itself removes and stores."""
    size, usable = found.block_size, found.reusable_blocks(choice)
    nodes = [known[block] for block in _leading(prompt.asked.hashes, known)]
    hit_tokens = min(choice.cached_tokens, choice.prompt_tokens)
    hit, reusable = hit_tokens // size, min(len(nodes), usable)
    missed = nodes[hit:reusable]
    lost = next((at for at, node in enumerate(missed) if not node.is_held), len(missed))
    evicted = missed[lost:] if prompt.asked.reads else []
    taken: dict[str, int] = {}
    for node in evicted:
        if not node.is_held and node.removed_by in choices:
            name = choices[node.removed_by].name
            taken[name] = taken.get(name, 0) + size
    known_tokens = max(reusable * size, hit_tokens)
    rest = choice.prompt_tokens - known_tokens
    blocks = len(prompt.asked.hashes)
    # All is known that a cache could have; behind it stand the prompt's last block, if that is known, or less than one.
    ends = 0 < usable == reusable and (blocks == usable or len(nodes) > usable)
    leaves = not ends and reusable > 0 and nodes[reusable - 1].is_followed
    outcomes = {
        "hit": hit_tokens,
        "miss_evicted": len(evicted) * size,
        "miss_disabled": 0 if prompt.asked.reads else len(missed) * size,
        "miss_sub_block": (lost * size if prompt.asked.reads else 0) + (rest if ends else 0),
        "miss_diverged" if leaves else "miss_cold": 0 if ends else rest,
    }
    shared = len(nodes) if ends else reusable  # the last block of a prompt, too
    source = choices.get(nodes[shared - 1].writer) if shared else None
    return PrefixReport(
        prefix_outcomes={outcome: tokens for outcome, tokens in outcomes.items() if tokens},
        infinite_hit_tokens=known_tokens,
        diverged_at=known_tokens if leaves else None,
        evicted_by=taken,
        evicted_ago_ns=now_ns - evicted[0].removed_ns if evicted and not evicted[0].is_held else None,
        resized_hit_tokens=[],
        prefix_source=None if source is None else source.name,
        prefix_shared_tokens=shared * size,
    )  # fmt: skip


def _leading(hashes: Sequence[int], known: Mapping[int, KnownBlock]) -> Iterator[int]:
    for block in hashes:
        if block not in known:
            return
        yield block


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
