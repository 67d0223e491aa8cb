"""What watches the blocks: it is told of everything that requests do to them, and changes nothing."""

from dataclasses import dataclass, field
from typing import Protocol

from metrics.memory.prefix_outcomes import PrefixReport


class Reader(Protocol):
    """What a journal asks of a request."""

    order: int
    id: str
    prompt_tokens: int
    token_ids: list[int]
    cache_salt: str
    fork_of: str | None
    preemptions: int
    num_committed_tokens: int
    prefix_report: PrefixReport | None  # which the journal writes

    @property
    def num_tokens(self) -> int: ...

    @property
    def reads_cache(self) -> bool: ...

    def block_hashes(self, block_size: int, count: int) -> list[bytes]: ...


@dataclass(slots=True)
class BlockTimes:
    """Of sampled blocks, since they were last asked for; the words are those of StepRecord."""

    reuse_gap_ns: list[int] = field(default_factory=list)
    reuse_distance_blocks: list[int] = field(default_factory=list)
    evicted_age_ns: list[int] = field(default_factory=list)
    evicted_idle_ns: list[int] = field(default_factory=list)
    forgotten_blocks: int = 0


class Journal(Protocol):
    """Told of everything that requests do to blocks. Must change nothing of it."""

    now_ns: int  # of the turn; the loop sets it
    has_times: bool  # something is there for `take_times`

    def asks(self, reader: Reader, count: int) -> None:
        """It is about to take the first `count` blocks of its prefix from the cache, to see whether it gets a place."""

    def returns(self, reader: Reader) -> None:
        """... and gave them back: it did not."""

    def admitted(self, reader: Reader) -> None:
        """... and has a place, and its blocks."""

    def shares(self, reader: Reader, leader: Reader, count: int) -> None:
        """A waiting fork reads the first `count` blocks of its leader, or those of them that have become full."""

    def copies(self, reader: Reader, index: int) -> None:
        """It reads that block no more, but a copy of its own that is not full."""

    def grew(self, reader: Reader) -> None:
        """It was given more blocks while it runs."""

    def filled(self, reader: Reader, count: int) -> None:
        """Its first `count` blocks are full and committed."""

    def released(self, reader: Reader) -> None:
        """It gives all blocks back."""

    def flush(self) -> None:
        """The tokens of a step are out: books what happened since the last call. Whoever was admitted has a report of
        its first query then, unless it is a fork."""

    def take_times(self) -> BlockTimes:
        """What was sampled since the last call."""


class NoJournal:
    """Nothing is written down."""

    has_times = False

    def __init__(self) -> None:
        self.now_ns = 0

    def asks(self, reader: Reader, count: int) -> None: ...

    def returns(self, reader: Reader) -> None: ...

    def admitted(self, reader: Reader) -> None: ...

    def shares(self, reader: Reader, leader: Reader, count: int) -> None: ...

    def copies(self, reader: Reader, index: int) -> None: ...

    def grew(self, reader: Reader) -> None: ...

    def filled(self, reader: Reader, count: int) -> None: ...

    def released(self, reader: Reader) -> None: ...

    def flush(self) -> None: ...

    def take_times(self) -> BlockTimes:
        return BlockTimes()
