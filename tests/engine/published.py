"""What left the loop, as the front would receive it. Knows no torch."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine import messages
from engine.sampling import TokenLogprobs
from engine.telemetry.step_rows import StepRows
from metrics.ledger import Account, ledger_at
from metrics.records import StepRecord

WAITING = (Account.REQUEST_QUEUE, Account.MEMORY_BLOCKED, Account.MEMORY_PREEMPTED)


def records_of(told: Iterable[messages.Outputs]) -> list[StepRecord]:
    """The steps that messages tell of, from a loop's first one on, or from one after it was idle; without costs."""
    rows = StepRows()
    for outputs in told:
        if outputs.steps is not None:
            rows.add(outputs.steps)
    steps = rows.take()
    return [] if steps is None else steps.records()


@dataclass
class Published:
    """Everything that left the loop."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    ended: dict[str, messages.Ended] = field(default_factory=dict)
    records: list[StepRecord] = field(default_factory=list)  # without costs
    rows: StepRows = field(default_factory=lambda: StepRows(hold_ns=0))
    ledgers: dict[str, list[tuple[int, list[int]]]] = field(default_factory=dict)  # id → (committed_ns, ledger)
    standings: dict[str, messages.Standing] = field(default_factory=dict)  # as each was told last
    logprobs: dict[str, list[TokenLogprobs | None]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)

    def take(self, outputs: messages.Outputs) -> None:
        outputs = messages.decode_from_core(messages.encode(outputs))  # as it would arrive in the front
        for output in outputs.outputs:
            self.tokens.setdefault(output.request_id, []).append(output.token_id)
            self.logprobs.setdefault(output.request_id, []).append(output.logprobs)
            if output.prompt_logprobs is not None:
                assert output.request_id not in self.prompt_logprobs, "told once"
                self.prompt_logprobs[output.request_id] = output.prompt_logprobs
            if output.standing is not None:
                self.standings[output.request_id] = output.standing
            if (standing := self.standings.get(output.request_id)) is not None:
                ledger = ledger_at(standing.base, outputs.reading)
                self.ledgers.setdefault(output.request_id, []).append((outputs.committed_ns, ledger))
                assert sum(standing.waits.values()) == sum(ledger[account] for account in WAITING), (
                    "a wait lacks its reason"
                )
        for ended in outputs.ended:
            assert sum(ended.waits.values()) == sum(ended.ledger[account] for account in WAITING), (
                "a wait lacks its reason"
            )
            self.ended[ended.request_id] = ended
        if outputs.steps is not None:
            self.rows.add(outputs.steps)
            steps = self.rows.take(outputs.committed_ns)
            self.records += [] if steps is None else steps.records()
