"""The bytes of a block outside of this process: a header, and the contents of its slot.

The header names the format, the model, the key and the length, and has a checksum. So a block of another model is never
read, and a damaged one is found out.
"""

import struct

import xxhash

MAGIC, FORMAT = b"sojourn-kv", 1
HEADER = struct.Struct("<10sH16s16sQ16s")  # magic, format, fingerprint, key, bytes of the block, their xxh3-128


class BlockFormat:
    """Headers of the blocks of one model."""

    def __init__(self, fingerprint: bytes, payload_bytes: int):
        self.fingerprint = fingerprint
        self.payload_bytes = payload_bytes
        self.block_bytes = HEADER.size + payload_bytes

    def header(self, key: bytes, memory: memoryview) -> bytes:
        checksum = xxhash.xxh3_128_digest(memory)
        return HEADER.pack(MAGIC, FORMAT, self.fingerprint, key, self.payload_bytes, checksum)

    def is_of(self, key: bytes, header: bytes) -> bool:
        """Whether it is the header of that block, whatever follows it."""
        if len(header) != HEADER.size:
            return False
        magic, version, fingerprint, named, length, _ = HEADER.unpack(header)
        expected = (MAGIC, FORMAT, self.fingerprint, key, self.payload_bytes)
        return (magic, version, fingerprint, named, length) == expected

    def is_whole(self, key: bytes, header: bytes, memory: memoryview) -> bool:
        return self.is_of(key, header) and HEADER.unpack(header)[-1] == xxhash.xxh3_128_digest(memory)
