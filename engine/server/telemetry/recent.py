"""The last steps and requests, in memory, with and without a run directory."""

from collections import OrderedDict, deque

import msgspec

from metrics.records import RequestRecord, StepRecord
from metrics.steps import Steps

KEPT_STEPS = 4_096
KEPT_REQUESTS = 1_024
PACKED_AT_ONCE = 32


class Recent:
    """Two rings, of batches of steps and of packed requests: as objects they would be several times as large, and all
    work for the collector."""

    def __init__(self) -> None:
        self._batches: deque[Steps] = deque()
        self._num_steps = 0
        self._requests: OrderedDict[str, bytes] = OrderedDict()
        self._fresh: list[RequestRecord] = []  # not packed yet
        self.last_step = -1  # number of the newest
        self._encode = msgspec.msgpack.Encoder().encode

    def add_steps(self, steps: Steps) -> None:
        self._batches.append(Steps(steps.numbers, steps.makeups, steps.others))  # without what it has worked out
        self._num_steps += len(steps)
        while self._num_steps - len(self._batches[0]) >= KEPT_STEPS:
            self._num_steps -= len(self._batches.popleft())
        self.last_step = int(steps["step"][-1])

    def add_request(self, record: RequestRecord) -> None:
        self._fresh.append(record)
        if len(self._fresh) >= PACKED_AT_ONCE:
            self._pack()

    def steps(self, last: int = KEPT_STEPS) -> list[StepRecord]:
        """The newest is the last one."""
        return [batch.record(row) for batch, row in self.step_places(last)]

    def step_places(self, last: int = KEPT_STEPS) -> list[tuple[Steps, int]]:
        """Batch and row of each, for `Steps.record`: thousands of records at once would keep streams waiting."""
        found: list[tuple[Steps, int]] = []
        for batch in reversed(self._batches):
            missing = min(last, KEPT_STEPS) - len(found)
            if missing <= 0:
                break
            found += [(batch, row) for row in reversed(range(max(0, len(batch) - missing), len(batch)))]
        return found[::-1]

    def packed_requests(self, last: int = KEPT_REQUESTS) -> list[bytes]:
        """For `request`; those that ended, the newest is the last one."""
        self._pack()
        return list(self._requests.values())[-last:]

    def packed_request(self, request_id: str) -> bytes | None:
        self._pack()
        return self._requests.get(request_id)

    def _pack(self) -> None:
        for record in self._fresh:
            self._requests.pop(record.request_id, None)
            self._requests[record.request_id] = self._encode(record)
            if len(self._requests) > KEPT_REQUESTS:
                self._requests.popitem(last=False)
        self._fresh.clear()


request = msgspec.msgpack.Decoder(RequestRecord).decode
