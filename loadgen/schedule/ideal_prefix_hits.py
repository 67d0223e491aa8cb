"""The hits of an infinite prefix cache on a schedule: the ideal to compare a server's hit rate with. Pure.

A prompt is a path of segments (a trace's blocks, a shared prefix, the nodes of a tree, the turns of a conversation with
their answers at full length), then tokens of its own. It shares the longest path of an earlier request, in whole blocks
of the cache, and never its last token: a server has to compute one to answer. Unknown are the tokens of a chat
template, the shared parts of recorded texts, and requests in flight together, which find nothing of each other.
"""

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass

from sojourn.loadgen.scenario.workload import Workload
from sojourn.loadgen.schedule.request import ScheduledRequest

Segment = tuple[object, int]  # what it is, tokens


@dataclass(slots=True)
class Node:
    """One segment after one path. `seen` is its longest beginning in any request."""

    children: dict[object, "Node"]
    seen: int = 0


def ideal_hits(prompts: Iterable[tuple[list[Segment], int]], block_tokens: int) -> Iterator[int]:
    """Tokens of each prompt (its segments, its length) that an infinite cache holds, in order of the prompts."""
    root = Node({})
    for segments, num_tokens in prompts:
        shared, node, on_the_way = 0, root, True
        for name, size in segments:
            known = node.children.get(name)
            if on_the_way:
                shared += min(known.seen, size) if known else 0
                on_the_way = known is not None  # only what was there in full has children
            if known is None:
                known = node.children[name] = Node({})
            known.seen = max(known.seen, size)
            node = known
        yield max(0, min(shared, num_tokens - 1)) // block_tokens * block_tokens


def segments_of(request: ScheduledRequest, workload: Workload) -> list[Segment]:
    """The part of a prompt that others may share; [] if it is all its own."""
    if request.block_ids:
        size, length = request.block_tokens, request.prompt_tokens
        return [(block, min(size, length - place * size)) for place, block in enumerate(request.block_ids)]
    if request.shared_prefix < 0:
        return []
    klass = next(each for each in workload.classes if each.klass == request.klass)
    if klass.shared_part == "last":
        return []
    if klass.prefix_tree is None:
        return [((request.klass, request.shared_prefix), request.shared_prefix_tokens)]
    return [((request.klass, node), klass.prefix_tree.node_tokens) for node in tree_path(klass.prefix_tree, request)]


def tree_path(tree, request: ScheduledRequest) -> list[tuple[int, int]]:
    """(level, number of the node on it) from the root down to the leaf that `shared_prefix` counts."""
    return [(level, request.shared_prefix // tree.branching ** (tree.depth - 1 - level)) for level in range(tree.depth)]


def ideal_hit_rate(
    workload: Workload, sent: Iterable[ScheduledRequest], measured: Container[int], block_tokens: int
) -> dict[str, float | int] | None:
    """The share of prompt tokens that an infinite cache holds, over the `measured` requests (by index), in order of
    sending. None where only recorded texts could share, and where nothing is measured."""
    prompts = list(_prompts(workload, sent))
    recorded = any(klass.content == "recorded" for klass in workload.classes)
    if recorded and not any(segments for _, segments, _ in prompts):
        return None
    hits = ideal_hits(((segments, num_tokens) for _, segments, num_tokens in prompts), block_tokens)
    found = total = 0
    for hit, (index, _, num_tokens) in zip(hits, prompts, strict=True):
        if index is not None and index in measured:
            found, total = found + hit, total + num_tokens
    if not total:
        return None
    return {
        "ideal_hit_rate": found / total, "ideal_hit_tokens": found, "prompt_tokens": total,
        "block_tokens": block_tokens,
    }  # fmt: skip


def _prompts(workload: Workload, sent: Iterable[ScheduledRequest]) -> Iterator[tuple[int | None, list[Segment], int]]:
    """Index, segments and length of each prompt. In a session also None and the same with its answer, which the cache
    then has. Answers at full length."""
    in_turns = {klass.klass for klass in workload.classes if klass.has_turns}
    histories: dict[str, list[Segment]] = {}  # by session
    for request in sent:
        if request.klass not in in_turns or request.prelude:
            yield request.index, segments_of(request, workload), request.prompt_tokens
            continue
        session = request.session_id
        before = histories.get(session) or segments_of(request, workload)
        added = request.prompt_tokens - sum(size for _, size in before)
        prompt = [*before, ((session, request.turn), added)]
        yield request.index, prompt, request.prompt_tokens
        histories[session] = [*prompt, ((session, request.turn, "answer"), request.max_tokens)]
        yield None, histories[session], request.prompt_tokens + request.max_tokens
