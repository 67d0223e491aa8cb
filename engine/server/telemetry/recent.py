"""The last steps and requests, in memory, with and without a run directory."""

from collections import OrderedDict, deque

import msgspec

from sojourn.metrics.records import RequestRecord, StepRecord

RECENT_STEPS = 4_096
RECENT_REQUESTS = 1_024


class Recent:
    """Two rings of encoded records: as objects they would be several times as large, and work for the collector."""

    def __init__(self) -> None:
        self._steps: deque[bytes] = deque(maxlen=RECENT_STEPS)
        self._requests: OrderedDict[str, bytes] = OrderedDict()
        self.last_step = -1  # number of the newest
        self._encode = msgspec.msgpack.Encoder().encode

    def add_step(self, record: StepRecord) -> None:
        self._steps.append(self._encode(record))
        self.last_step = record.step

    def add_request(self, record: RequestRecord) -> None:
        self._requests.pop(record.request_id, None)
        self._requests[record.request_id] = self._encode(record)
        if len(self._requests) > RECENT_REQUESTS:
            self._requests.popitem(last=False)

    def packed_steps(self, last: int = RECENT_STEPS) -> list[bytes]:
        """For `step`; the newest is the last one."""
        return list(self._steps)[max(0, len(self._steps) - last) :]

    def steps(self, last: int = RECENT_STEPS) -> list[StepRecord]:
        """The newest is the last one. Thousands of records at once would keep streams waiting: see `packed_steps`."""
        return list(map(step, self.packed_steps(last)))

    def packed_requests(self, last: int = RECENT_REQUESTS) -> list[bytes]:
        """For `request`; those that ended, the newest is the last one."""
        return list(self._requests.values())[-last:]

    def packed_request(self, request_id: str) -> bytes | None:
        return self._requests.get(request_id)


step = msgspec.msgpack.Decoder(StepRecord).decode
request = msgspec.msgpack.Decoder(RequestRecord).decode
