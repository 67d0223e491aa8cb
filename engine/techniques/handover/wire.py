"""What decode servers and prefill servers say to each other: msgspec structs over ZeroMQ. Nothing is ever unpickled."""

import msgspec

VERSION = 2
MAX_MESSAGE_BYTES = 1 << 20
MOST_SLOTS = 1 << 16  # of one message


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Decode → prefill: how are your slots read? Answered by `Welcome`."""

    version: int


class Follow(msgspec.Struct, frozen=True, tag=True):
    """Decode → prefill: which slots have the blocks of this transfer? Answered by `Progress` until it is over."""

    transfer_id: str


class Release(msgspec.Struct, frozen=True, tag=True):
    """Decode → prefill: the blocks of a lease are not needed any more. Not answered."""

    lease_id: str


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Prefill → decode. The fingerprint tells whether the same tokens have the same blocks on both sides."""

    version: int
    engine_id: str
    fingerprint: bytes
    facts: dict[str, str]  # settings that the fingerprint covers, to say what differs
    transport: str
    descriptor: bytes


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Prefill → decode: what may be read of a transfer. Without news it says that the server is alive."""

    transfer_id: str
    engine_id: str
    is_known: bool  # the call of this transfer has come
    first: int = 0  # block of the prompt that the first slot has
    slots: list[int] = []
    is_over: bool = False  # no more slots come
    lease_id: str = ""  # of an end: what to give back
    error: str = ""  # of an end: why the prompt was not computed


ToPrefill = Hello | Follow | Release
ToDecode = Welcome | Progress

encode = msgspec.msgpack.Encoder().encode
decode_to_prefill = msgspec.msgpack.Decoder(ToPrefill).decode
decode_to_decode = msgspec.msgpack.Decoder(ToDecode).decode
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
