"""Runs of a few hand-made steps, for answers worked out in one's head. A step takes 10 ms, all of it device."""

from dataclasses import dataclass, field

import pandas as pd
import pyarrow as pa

from sojourn.metrics.ledger import ACCOUNTS
from sojourn.metrics.records import StepRecord
from sojourn.metrics.records.tables import SCHEMAS, row
from sojourn.metrics.request.timeline import call_of

MS = 1_000_000
STEP_NS = 10 * MS
BEGIN_NS = 1000 * MS


@dataclass
class Scene:
    """Steps one after another from BEGIN_NS, and the requests that took part. Times are milliseconds since then."""

    steps: list[StepRecord] = field(default_factory=list)
    requests: list[dict] = field(default_factory=list)

    def step(self, *members: tuple[str, str, int, int], reason: str = "", taken: dict[str, str] | None = None) -> None:
        """Members are (request, kind, new tokens, past tokens); `reason` is why the head of the line was not admitted;
        `taken` maps who lost his blocks in this plan to whose need it was. FLOPs are the tokens."""
        at, gone = len(self.steps), taken or {}
        begin = BEGIN_NS + at * STEP_NS
        self.steps.append(
            StepRecord.of(
                step=at, begin_ns=begin, end_ns=begin + STEP_NS, stages=[0, 0, 0, 0, STEP_NS, 0, 0, 0],
                device_ns=STEP_NS, request_ids=[m[0] for m in members], new_tokens=[m[2] for m in members],
                past_tokens=[m[3] for m in members], kinds=[m[1] for m in members], padding_tokens=0, graph="eager",
                budget=64, waiting=1 if reason else 0, refusals={reason: 1} if reason else {},
                preempted_ids=list(gone), evicted_blocks=0, blocks_free=0, blocks_active=1, blocks_reusable=0,
                flops=sum(m[2] for m in members), bytes=1, predicted_ns=None, planned_ns=begin,
                device_end_ns=begin + STEP_NS, sampling_ns=0, preempted_for=list(gone.values()),
                preempted_tokens=[1] * len(gone),
            )
        )  # fmt: skip

    def request(
        self, name: str, came_ms: float, prompt: int = 1, waits: dict[str, float] | None = None, **booked
    ) -> None:
        """`booked` are milliseconds by account with `_` for `.`: `request_queue=10`."""
        ran = [step.step for step in self.steps if name in map(call_of, step.request_ids)]
        ledger = {f"ledger_{info.column}": booked.pop(info.column[:-3], 0) * MS for info in ACCOUNTS}
        self.requests.append(
            {"request_id": name, "arrived_ns": BEGIN_NS + round(came_ms * MS),
             "finished_ns": BEGIN_NS + len(self.steps) * STEP_NS,
             "prompt_tokens": prompt, "first_step": min(ran, default=None), "last_step": max(ran, default=None),
             "tenant": booked.pop("tenant", ""), "klass": booked.pop("klass", ""),
             "token_ns": booked.pop("token_ns", [BEGIN_NS + (step + 1) * STEP_NS for step in ran]),
             "finish_reason": "length", "waits": {reason: round(ms * MS) for reason, ms in (waits or {}).items()}}
            | ledger
        )  # fmt: skip
        assert not booked, f"no such account: {booked}"

    def tables(self) -> tuple[pa.Table, pd.DataFrame]:
        steps = pa.Table.from_pylist([row(step) for step in self.steps], schema=SCHEMAS["steps"])
        return steps, pd.DataFrame(self.requests).astype({"first_step": "float64", "last_step": "float64"})
