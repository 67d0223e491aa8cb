"""`telemetry=off` in the front: the gauges of the core's state, and the few events that no record holds."""

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

from sojourn.engine import messages
from sojourn.engine.config import EngineConfig, model_folder
from sojourn.engine.server.gateway.usage.usage_log import UsageLog
from sojourn.engine.server.telemetry.recent import Recent
from sojourn.interop.exported.prometheus import Exporter
from sojourn.interop.exported.prometheus_pool import Pool
from sojourn.metrics.memory.residence import ModelResidence
from sojourn.metrics.records import RequestRecord


class NoTelemetry:
    """In the place of Telemetry. Keeps the core's last message: a scrape shows its state."""

    recorder = None
    failure = None
    usage: UsageLog | None = None  # set by the server that bills
    new_event_loop = asyncio.SelectorEventLoop  # which nobody watches

    def __init__(self, config: EngineConfig):
        name = config.served_model_name or model_folder(config.model).name
        self.exporter = Exporter(name, telemetry="off")
        self.recent = Recent()  # of nothing
        self._last: messages.Tokens | None = None

    def core_died(self, restarts: bool) -> None:
        self._last = None
        if restarts:
            self.exporter.observe_core_restart()

    def ready(self, message: messages.Ready) -> None:
        self.exporter.gauges.observe_state(Pool(message.num_kv_blocks))
        self.exporter.gauges.observe_plan(message.memory)
        self.exporter.gauges.observe_weight_error(message.weight_error)
        self.exporter.core.observe_startup(message.startup)

    def residences(self, found: list[ModelResidence]) -> None:
        """There is no run directory."""

    def tokens(self, message: messages.Tokens) -> None:
        self._last = message

    def observed(self, message: messages.Observed) -> None:
        """No step is in it."""

    async def refresh(self) -> None:
        """Nothing waits."""

    def request(self, record: RequestRecord, attributes: Mapping[str, Any]) -> None:
        """Its ledger is empty: it would be counted wrong."""

    def scrape(self) -> bytes:
        if (last := self._last) is not None:
            self.exporter.gauges.observe_state(Pool(*last.blocks), last.waiting, last.running)
        if self.usage is not None:
            self.exporter.observe_recorder(0, self.usage.writer.failed)
        return self.exporter.render()

    def watches(self, core_pid) -> list[Coroutine]:
        return []

    def close(self) -> None:
        """Nothing was begun."""
