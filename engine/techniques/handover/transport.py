"""A transport as peers see it: it reads blocks from the host memory of another process. No tensors."""

from collections.abc import Sequence
from typing import Protocol

from sojourn.metrics.errors import SojournError


class TransferError(SojournError):
    """A transfer that failed, with a sentence. `is_refusal`: it fails whenever it is tried with that peer."""

    def __init__(self, sentence: str, *, is_refusal: bool = False):
        super().__init__(sentence)
        self.is_refusal = is_refusal


class PeerSlots(Protocol):
    """The slots of one peer. Each call waits for its end, and raises TransferError. One thread uses it."""

    def headers(self, slots: Sequence[int]) -> list[bytes]:
        """HEADER_BYTES of each of the peer's slots."""
        ...

    def read(self, slots: Sequence[tuple[int, int]]) -> None:
        """Copies blocks: the peer's slot → our slot."""
        ...

    def close(self) -> None: ...


class KVTransport(Protocol):
    """Owns the registration of our slots, and connects to those of peers."""

    name: str  # as the setting kv_transport

    def descriptor(self) -> bytes:
        """What a peer needs to read our slots. It is sent on the side channel, and decoded without pickle."""
        ...

    def connect(self, descriptor: bytes) -> PeerSlots:
        """Raises TransferError for a descriptor that is none, or names what cannot be read from here."""
        ...

    def close(self) -> None: ...
