"""Who needed the room of blocks that were missed later, from the records of requests and their evictions."""

from collections import Counter, defaultdict
from collections.abc import Mapping

import pandas as pd

from sojourn.live.kv_lens.document import Kind, Taker
from sojourn.metrics.memory.kv_event_wire import GPU
from sojourn.metrics.memory.pool_history import BlockHistory

MOST_TAKERS = 12
VICTIMS = 3
UNKNOWN = "unknown"


def takers_of(asked: pd.DataFrame, klass: Mapping[str, str], history: BlockHistory) -> list[Taker]:
    """By class, where the run has several, and then by request; most missed tokens first.

    `asked` are the rows whose misses count; `klass` says the class of any request.
    """
    missed: Counter[str] = Counter()
    victims: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for name, cell in zip(asked.request_id, asked.evicted_by, strict=True):
        for taker, tokens in (cell if isinstance(cell, dict) else {}).items():
            missed[_call(taker)] += tokens
            victims[_call(taker)][name] += tokens
    taken: Counter[str] = Counter()
    for (_, medium), pool in history.pools.items():
        if medium == GPU:
            for name, blocks in pool.taken_by.items():
                taken[_call(name)] += blocks
    return [
        *(_by_class(missed, victims, taken, klass) if len(set(klass.values()) - {""}) > 1 else []),
        *(
            make_taker(name, "request", taken[name] if taken else None, tokens, victims[name])
            for name, tokens in missed.most_common(MOST_TAKERS)
        ),
    ]  # fmt: skip


def _by_class(
    missed: Counter[str], victims: Mapping[str, Counter[str]], taken: Counter[str], klass: Mapping[str, str]
) -> list[Taker]:
    of_class: Counter[str] = Counter()
    victims_of_class: defaultdict[str, Counter[str]] = defaultdict(Counter)
    blocks: Counter[str] = Counter()
    for name, count in taken.items():
        blocks[klass.get(name, "")] += count
    for taker, tokens in missed.items():
        of_class[klass.get(taker, "")] += tokens
        for victim, part in victims[taker].items():
            victims_of_class[klass.get(taker, "")][klass.get(victim, "")] += part
    return [
        make_taker(name or UNKNOWN, "class", blocks[name] if taken else None, tokens, victims_of_class[name])
        for name, tokens in of_class.most_common()
    ]


def make_taker(name: str, kind: Kind, blocks: int | None, tokens: int, victims: Counter[str]) -> Taker:
    return Taker(
        name=name, kind=kind, evicted_blocks=blocks, missed_tokens=tokens,
        victims=[victim or UNKNOWN for victim, _ in victims.most_common(VICTIMS)],
    )  # fmt: skip


def _call(sequence: str) -> str:
    """The call of a sequence: its further choices have numbers."""
    return sequence.split("#", 1)[0]
