"""What left the loop, as the front would receive it. Knows no torch."""

from dataclasses import dataclass, field

from sojourn.engine import messages
from sojourn.engine.sampling import TokenLogprobs
from sojourn.metrics.ledger import Account, ledger_at
from sojourn.metrics.records import StepRecord

WAITING = (Account.REQUEST_QUEUE, Account.MEMORY_BLOCKED, Account.MEMORY_PREEMPTED)


@dataclass
class Published:
    """Everything that left the loop."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    ended: dict[str, messages.Ended] = field(default_factory=dict)
    records: list[StepRecord] = field(default_factory=list)  # without costs
    ledgers: dict[str, list[tuple[int, list[int]]]] = field(default_factory=dict)  # id → (committed_ns, ledger)
    bases: dict[str, messages.LedgerBase] = field(default_factory=dict)  # the last one of each request
    logprobs: dict[str, list[TokenLogprobs | None]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    kv_events: list[bytes] = field(default_factory=list)  # batches

    def take(self, message: messages.Tokens | messages.Observed | messages.KVEvents) -> None:
        message = messages.decode_from_core(messages.encode(message))  # as it would arrive in the front
        if isinstance(message, messages.Tokens):
            self._take_tokens(message)
        elif isinstance(message, messages.KVEvents):
            self.kv_events.append(message.batch)
        else:
            self._take_observed(message)

    def _take_tokens(self, message: messages.Tokens) -> None:
        for output in message.outputs:
            self.tokens.setdefault(output.request_id, []).append(output.token_id)
            self.logprobs.setdefault(output.request_id, []).append(output.logprobs)
            if output.prompt_logprobs is not None:
                assert output.request_id not in self.prompt_logprobs, "sent once"
                self.prompt_logprobs[output.request_id] = output.prompt_logprobs
            if output.ledger is not None:
                self.bases[output.request_id] = output.ledger
            if (known := self.bases.get(output.request_id)) is not None:
                ledger = ledger_at(known.base, message.clock_ns)
                self.ledgers.setdefault(output.request_id, []).append((message.committed_ns, ledger))
                _assert_waits_have_reasons(known.waits, ledger)

    def _take_observed(self, message: messages.Observed) -> None:
        for ended in message.ended:
            _assert_waits_have_reasons(ended.waits, ended.ledger)
            self.ended[ended.request_id] = ended
        if message.step is not None:
            self.records.append(message.step)


def _assert_waits_have_reasons(waits: dict[str, int], ledger: list[int]) -> None:
    assert sum(waits.values()) == sum(ledger[account] for account in WAITING), "a wait lacks its reason"
