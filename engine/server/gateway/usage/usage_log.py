"""Every call of a server as usage records: its begin, its progress and its end."""

import asyncio
import logging
import time
from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import msgspec

from sojourn.engine.config import EngineConfig
from sojourn.engine.messages import Ready
from sojourn.engine.server.core.call import Call, Caller
from sojourn.engine.server.gateway.usage.device_shares import DeviceShares, PowerMeter
from sojourn.engine.server.gateway.usage.writer import UsageWriter
from sojourn.metrics.ledger import Account
from sojourn.metrics.records import RequestRecord, StepRecord, SystemRecord
from sojourn.metrics.usage.price_list import PriceList, load_price_list
from sojourn.metrics.usage.record import Begin, End, Progress, UsageRecord, status_of

log = logging.getLogger(__name__)
TICK_SECONDS = 1.0  # the most that is unknown of the tokens of a call that a kill interrupts
FILE_BYTES, SYNC_SECONDS = 64 * 1024 * 1024, 1.0  # by default
NS_PER_MS = 1_000_000
_WAITS = {
    "queue_ms": (Account.REQUEST_QUEUE, Account.MEMORY_BLOCKED),
    "quota_ms": (Account.REQUEST_QUOTA,),
    "moderation_ms": (Account.REQUEST_MODERATION,),
}


@dataclass(slots=True)
class _OpenCall:
    """A call that the core has, or is about to get."""

    call: Call
    record: UsageRecord  # as it began
    power: tuple[float, float]  # reading of the meter at its begin
    written: tuple[int, int] = (0, 0)  # cached and output tokens of its last progress

    @property
    def sequence_ids(self) -> list[str]:
        return [sequence.request.request_id for sequence in self.call.sequences]


class UsageLog:
    """Owns the usage file, and what is known of the calls without an end.

    Raises RunDataError if the folder cannot be written, and InputError if the price list cannot be read.
    """

    def __init__(self, config: EngineConfig, model: str):
        self._prices: PriceList | None = load_price_list(config.usage_prices) if config.usage_prices else None
        seconds = SYNC_SECONDS if config.usage_sync_seconds is None else config.usage_sync_seconds
        self.writer = UsageWriter(config.usage_dir, config.usage_file_bytes or FILE_BYTES, sync_each_line=not seconds)
        self.priced: defaultdict[tuple[str, str, str], Decimal] = defaultdict(Decimal)  # tenant, currency, basis
        self.failure: str | None = None  # once closed: what is lost, as a sentence
        self._model, self._sync_seconds = model, seconds
        self._is_measured = config.telemetry == "full"
        self._shares, self._power = DeviceShares(), PowerMeter()
        self._open: dict[str, _OpenCall] = {}  # by request id
        self._number = 0

    def begin(self, call: Call) -> None:
        """Before the core gets a call."""
        record = msgspec.structs.replace(self._begin_record(call.caller), prompt_tokens=call.prompt_tokens)
        opened = self._open[call.caller.request_id] = _OpenCall(call, record, self._power.reading)
        self._shares.count(opened.sequence_ids)
        self.writer.write(Begin(record))

    def answer(self, call: Call, status: int, code: str | None) -> None:
        """Before the last byte of its answer, or of its error. The device's time is known a moment later: `end`."""
        opened = self._open[call.caller.request_id]
        changes = {"finish_reason": call.finish_reason if status == 200 else None} | _tokens(call)
        self._end(opened.record, call.caller, status, code, changes, is_final=False)

    def end(self, caller: Caller, status: int, code: str | None, record: RequestRecord | None) -> None:
        """The end of every call, as `Front.end` reports it. A refusal is not sent before this returns."""
        opened = self._open.pop(caller.request_id, None)
        if opened is None:
            self._end(self._begin_record(caller), caller, status, code, {})
            return
        device_ns = self._shares.take(opened.sequence_ids)
        changes = _tokens(opened.call) if record is None else _measures(record)
        if self._is_measured and record is not None:
            watts = self._power.watts_since(opened.power)
            changes["device_ms"] = round(device_ns) / NS_PER_MS
            changes["joules"] = None if watts is None else watts * device_ns / 1e9
            changes["computed_tokens"] = record.computed_tokens + record.recomputed_tokens
            for name, accounts in _WAITS.items():
                changes[name] = sum(record.ledger[account] for account in accounts) / NS_PER_MS
        self._end(opened.record, caller, status, code, changes)

    def ready(self, message: Ready) -> None:
        self._shares.shape = message.shape

    def step(self, record: StepRecord) -> None:
        self._shares.add(record)

    def system(self, record: SystemRecord) -> None:
        self._power.add(record)

    async def run(self) -> None:
        """Writes progress and syncs, until it is cancelled."""
        synced = time.monotonic()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            try:
                self.tick()
                if self._sync_seconds and time.monotonic() - synced >= self._sync_seconds:
                    await asyncio.to_thread(self.writer.sync)
                    synced = time.monotonic()
            except Exception:  # of one tick; the next one follows
                log.exception("the progress of calls could not be written")

    def tick(self) -> None:
        """One line for all calls that have new tokens. In a file that was begun anew, their begins too."""
        if self.writer.check():
            for opened in self._open.values():
                self.writer.write(Begin(opened.record))
        tokens = {}
        for opened in self._open.values():
            now = opened.call.cached_tokens, opened.call.generated_tokens
            if now != opened.written:
                tokens[opened.record.call] = opened.written = now
        if tokens:
            self.writer.write(Progress(tokens))

    def close(self) -> None:
        self.failure = self.writer.close()

    def _begin_record(self, caller: Caller) -> UsageRecord:
        self._number += 1
        since_arrival = timedelta(microseconds=(time.monotonic_ns() - caller.arrived_ns) // 1000)
        return UsageRecord(
            call=f"{self.writer.life}-{self._number}",
            request_id=caller.request_id,
            time=datetime.now(UTC) - since_arrival,
            tenant=caller.tenant,
            key_id=caller.key_id,
            model=self._model,
            route=caller.route,
            adapter=None if caller.adapter is None else caller.adapter.name,
        )

    def _end(
        self, record: UsageRecord, caller: Caller, status: int, code: str | None, changes: dict, is_final: bool = True
    ) -> None:
        """`changes`: what is known of a call that the core got; empty for all others. A final end follows one that is
        not, and replaces it."""
        known = {
            "seconds": (time.monotonic_ns() - caller.arrived_ns) / 1e9,
            "status": status_of(status, reached_core=bool(changes)),
            "http_status": status,
            "code": code,
            "quota_ms": caller.quota_ns / NS_PER_MS,
            "moderation_ms": caller.moderation_ns / NS_PER_MS,
        }
        ended = msgspec.structs.replace(record, **(known | changes))
        if self._prices is not None:
            ended = self._prices.priced(ended)
            for basis, price in (("tokens", ended.price_of_tokens), ("device", ended.price_of_device)):
                if is_final and price is not None:
                    self.priced[ended.tenant, self._prices.currency, basis] += price
        self.writer.write(End(ended))


def _tokens(call: Call) -> dict[str, int]:
    return {"cached_tokens": call.cached_tokens, "output_tokens": call.generated_tokens}


def _measures(record: RequestRecord) -> dict:
    """What the record of a call says: the same numbers as in the server's metrics."""
    return {
        "finish_reason": record.finish_reason,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
    }
