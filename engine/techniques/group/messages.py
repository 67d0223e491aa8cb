"""What the ranks of a group say to each other beside their collectives: msgspec structs over ZeroMQ, never pickled."""

import msgspec

from sojourn.engine.techniques.group.rank_step import BetweenSteps, Conclude, RankReport, RankStep


class Identity(msgspec.Struct, frozen=True):
    """What all ranks of a group must have in common."""

    version: str  # of this project, Python and torch
    settings: str  # digest
    weights: str  # digest of the checkpoint's files: see engine.runner.checkpoint_files


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Rank → rank 0: it is there. Answered by Welcome, unless it is refused."""

    rank: int
    identity: Identity


class Planned(msgspec.Struct, frozen=True, tag=True):
    """Rank → rank 0: it has room for so many KV blocks, on its device or in its host memory. Answered by Agreed."""

    rank: int
    num_blocks: int


class Joined(msgspec.Struct, frozen=True, tag=True):
    """Rank → rank 0: it computes steps from now on."""

    rank: int


class Broken(msgspec.Struct, frozen=True, tag=True):
    """Rank → rank 0: why it ends, as a sentence."""

    rank: int
    sentence: str


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Rank → rank 0, each second in which it computes no step: it reads its messages."""

    rank: int


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Rank 0 → rank: all ranks are there and equal. They connect, and load the model."""


class Agreed(msgspec.Struct, frozen=True, tag=True):
    """Rank 0 → rank: the blocks that every rank has room for."""

    num_blocks: int


FromRank = Hello | Planned | Joined | Broken | Beat | RankReport
ToRank = Welcome | Agreed | RankStep | Conclude | BetweenSteps

encode = msgspec.msgpack.Encoder().encode
decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode
decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
