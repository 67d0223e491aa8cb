"""What decode servers and prefill servers say to each other: msgspec structs over ZeroMQ. Nothing is ever unpickled."""

import msgspec

VERSION = 1
MAX_MESSAGE_BYTES = 1 << 20


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Decode → prefill: how are your slots read? Answered by `Welcome`."""

    version: int
    engine_id: str  # that the sender expects


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Prefill → decode. The fingerprint tells whether the same tokens have the same blocks on both sides."""

    version: int
    engine_id: str
    fingerprint: bytes
    facts: dict[str, str]  # settings that the fingerprint covers, to say what differs
    transport: str
    descriptor: bytes


class Release(msgspec.Struct, frozen=True, tag=True):
    """Decode → prefill: the blocks of a lease are not needed any more. Not answered."""

    lease_id: str


ToPrefill = Hello | Release

encode = msgspec.msgpack.Encoder().encode
decode_to_prefill = msgspec.msgpack.Decoder(ToPrefill).decode
decode_welcome = msgspec.msgpack.Decoder(Welcome).decode
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
