"""Transport by NIXL: one-sided reads over UCX, also from other hosts. TCP where there is no RDMA.

https://github.com/ai-dynamo/nixl. Addresses and NIXL's own metadata go over the side channel; its helpers that use
pickle are not called.
"""

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from sojourn.engine.techniques.handover.headers import HEADER_BYTES
from sojourn.engine.techniques.handover.shared_memory import SharedSegment
from sojourn.engine.techniques.handover.transport import TransferError
from sojourn.metrics.errors import ModelError

POLL_S = 0.0002
MOST_HEADERS = 64  # of one read


class NixlDescriptor(msgspec.Struct, frozen=True):
    """The registered memory of a peer."""

    metadata: bytes  # of its agent
    slots: int  # addresses
    headers: int
    num_slots: int
    block_bytes: int


class NixlTransport:
    """One agent of this process, with our slots registered. Raises ModelError where NIXL is not installed."""

    name = "nixl"

    def __init__(self, segment: SharedSegment, slot_bytes: Callable[[int], memoryview]):
        """`slot_bytes`: the memory of one of our slots, to read into; it lies in the segment."""
        self._segment = segment
        self._first = _address(slot_bytes(0))
        self._bounce = bytearray(MOST_HEADERS * HEADER_BYTES)  # headers of a peer
        self.lock = threading.Lock()  # an agent serves one thread at a time
        self.agent = _make_agent(f"sojourn-{secrets.token_hex(8)}")
        for memory in (segment.slots, segment.headers, memoryview(self._bounce)):
            self.agent.register_memory([(_address(memory), memory.nbytes, 0, "")], "DRAM")

    def descriptor(self) -> bytes:
        segment = self._segment
        own = NixlDescriptor(
            self.agent.get_agent_metadata(), self._first, _address(segment.headers), segment.num_slots,
            segment.block_bytes,
        )  # fmt: skip
        return msgspec.msgpack.encode(own)

    def connect(self, descriptor: bytes) -> "NixlPeer":
        try:
            place = msgspec.msgpack.decode(descriptor, type=NixlDescriptor)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise TransferError(f"its descriptor cannot be read: {error}", is_refusal=True) from None
        with self.lock:
            try:
                name = self.agent.add_remote_agent(place.metadata)
            except Exception as error:
                raise TransferError(f"NIXL cannot use its metadata: {error}") from None
        return NixlPeer(self, name, place)

    def slot_address(self, slot: int) -> int:
        return self._first + slot * self._segment.block_bytes

    def read_headers(self, peer: str, addresses: Sequence[int]) -> list[bytes]:
        """One read with the lock held from its begin to the copy: all peers share the memory for headers."""
        found, first = [], _address(memoryview(self._bounce))
        for begin in range(0, len(addresses), MOST_HEADERS):
            part = addresses[begin : begin + MOST_HEADERS]
            ours = [first + index * HEADER_BYTES for index in range(len(part))]
            with self.lock:
                self._move(peer, list(part), ours, HEADER_BYTES, lambda seconds: time.sleep(seconds))
                found += [bytes(self._bounce[at * HEADER_BYTES : (at + 1) * HEADER_BYTES]) for at in range(len(part))]
        return found

    def read_blocks(self, peer: str, theirs: Sequence[int], ours: Sequence[int], nbytes: int) -> None:
        def pause(seconds: float) -> None:
            self.lock.release()
            try:
                time.sleep(seconds)
            finally:
                self.lock.acquire()

        with self.lock:
            self._move(peer, list(theirs), list(ours), nbytes, pause)

    def close(self) -> None:
        """The agent ends with its process: the memory is still in use."""

    def _move(self, peer: str, theirs: list[int], ours: list[int], nbytes: int, pause: Callable[[float], None]) -> None:
        """Returns once nothing writes to our memory any more. So it has no time limit: UCX notices a dead peer, and a
        request stops to wait by itself."""
        agent = self.agent
        local = agent.get_xfer_descs([(address, nbytes, 0) for address in ours], "DRAM")
        remote = agent.get_xfer_descs([(address, nbytes, 0) for address in theirs], "DRAM")
        try:
            handle = agent.initialize_xfer("READ", local, remote, peer)
            state = agent.transfer(handle)
            while state == "PROC":
                pause(POLL_S)
                state = agent.check_xfer_state(handle)
            agent.release_xfer_handle(handle)
        except Exception as error:
            raise TransferError(f"NIXL could not read it: {type(error).__name__}: {error}") from None
        if state != "DONE":
            raise TransferError(f"NIXL could not read it: the transfer ended as {state}")


class NixlPeer:
    """The registered memory of one peer."""

    def __init__(self, transport: NixlTransport, agent: Any, place: NixlDescriptor):
        self._transport, self._agent, self._place = transport, agent, place

    def headers(self, slots: Sequence[int]) -> list[bytes]:
        begin = self._place.headers
        return self._transport.read_headers(self._agent, [begin + self._checked(s) * HEADER_BYTES for s in slots])

    def read(self, slots: Sequence[tuple[int, int]]) -> None:
        size = self._place.block_bytes
        theirs = [self._place.slots + self._checked(remote) * size for remote, _ in slots]
        ours = [self._transport.slot_address(local) for _, local in slots]
        self._transport.read_blocks(self._agent, theirs, ours, size)

    def close(self) -> None:
        with self._transport.lock:
            self._transport.agent.remove_remote_agent(self._agent)

    def _checked(self, slot: int) -> int:
        if not 0 <= slot < self._place.num_slots:
            raise TransferError(f"it has no slot {slot}")
        return slot


def _make_agent(name: str) -> Any:
    try:
        from nixl._api import nixl_agent, nixl_agent_config
    except ImportError as error:
        raise ModelError(
            f"kv_transport=nixl needs the package nixl, with nixl-cu12 or nixl-cu13 ({error}); install it, or use shm"
        ) from None
    try:
        return nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    except Exception as error:
        raise ModelError(f"kv_transport=nixl: NIXL cannot start its backend UCX: {error}") from None


def _address(memory: memoryview) -> int:
    return np.frombuffer(memory, np.uint8).ctypes.data
