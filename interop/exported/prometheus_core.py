"""What the front says of the core process: its start, whether it gives signs of life, and what arrives unreadable."""

from sojourn.interop.exported.prometheus_series import Series
from sojourn.metrics.catalog.metric import NS_PER_SECOND
from sojourn.metrics.compute.startup import PHASES, TIERS, Startup


class CoreFold:
    """Events that no record holds."""

    def __init__(self, series: Series):
        self._numbers = series.numbers

    def observe_startup(self, startup: Startup | None) -> None:
        """Of a core that is ready; the gauges show the last one."""
        if startup is None:
            return
        for name, label_values, measured in (
            ("startup_seconds", PHASES, startup.phases_ns),
            ("startup_read_bytes", TIERS, startup.read_bytes),
        ):
            samples = self._numbers[f"sojourn_compute_{name}"]
            samples.update(((value,), measured.get(value, 0)) for value in label_values)
        self._numbers["sojourn_compute_startup_spared_seconds"][()] = sum(startup.spared_ns.values())

    def observe_silence(self, seconds: float) -> None:
        """The time since the core's last message."""
        self._numbers["sojourn_telemetry_core_silence_seconds"][()] = round(seconds * NS_PER_SECOND)

    def observe_oldest_wait(self, seconds: float) -> None:
        """The age of the oldest request without a token; 0 where there is none."""
        self._numbers["sojourn_request_oldest_wait_seconds"][()] = round(seconds * NS_PER_SECOND)

    def observe_hang(self, outcome: str) -> None:
        """`outcome`: noticed or killed."""
        self._numbers["sojourn_telemetry_core_hangs_total"][(outcome,)] += 1

    def observe_unreadable(self, receiver: str, count: int) -> None:
        """`receiver`: front or core, which dropped so many messages."""
        self._numbers["sojourn_telemetry_unreadable_messages_total"][(receiver,)] += count
