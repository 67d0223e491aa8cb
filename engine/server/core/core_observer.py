"""What the client of a core tells the front's telemetry."""

from typing import Protocol

from sojourn.engine import messages
from sojourn.interop.exported.prometheus import Exporter


class CoreObserver(Protocol):
    """The front's telemetry, as the core client sees it."""

    exporter: Exporter

    def ready(self, message: messages.Ready) -> None: ...
    def tokens(self, message: messages.Tokens) -> None: ...
    def observed(self, message: messages.Observed) -> None: ...
    def core_died(self, restarts: bool) -> None: ...


class BlockEvents(Protocol):
    """Who publishes the batches of KV events that the core sends."""

    def publish(self, batch: bytes) -> None: ...
    def clear(self) -> None:
        """The core died, and its blocks with it."""
