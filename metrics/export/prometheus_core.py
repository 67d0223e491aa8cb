"""What the front says of the core process: whether it gives signs of life, and what arrives unreadable."""

from metrics.catalog.metric import NS_PER_SECOND
from metrics.export.prometheus_series import Series


class CoreFold:
    """Events that no record holds."""

    def __init__(self, series: Series):
        self._numbers = series.numbers

    def observe_silence(self, seconds: float) -> None:
        """The time since the core's last message."""
        self._numbers["sojourn_telemetry_core_silence_seconds"][()] = round(seconds * NS_PER_SECOND)

    def observe_hang(self, outcome: str) -> None:
        """`outcome`: noticed or killed."""
        self._numbers["sojourn_telemetry_core_hangs_total"][(outcome,)] += 1

    def observe_unreadable(self, receiver: str, count: int) -> None:
        """`receiver`: front or core, which dropped so many messages."""
        self._numbers["sojourn_telemetry_unreadable_messages_total"][(receiver,)] += count
