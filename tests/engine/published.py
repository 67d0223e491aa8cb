"""What left the loop, as the front would receive it. Knows no torch."""

from dataclasses import dataclass, field

from engine import messages
from engine.sampling import TokenLogprobs
from metrics.ledger import Account, ledger_at
from metrics.records import StepRecord
from metrics.step_batch import Steps

WAITING = (Account.REQUEST_QUEUE, Account.MEMORY_BLOCKED, Account.MEMORY_PREEMPTED)


def steps_of(outputs: messages.Outputs) -> list[StepRecord]:
    """The steps that a message tells of, without their costs."""
    return [] if outputs.steps is None else Steps.told(outputs.steps).records()


@dataclass
class Published:
    """Everything that left the loop."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    ended: dict[str, messages.Ended] = field(default_factory=dict)
    records: list[StepRecord] = field(default_factory=list)
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
        self.records += steps_of(outputs)
