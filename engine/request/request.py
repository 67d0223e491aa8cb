"""A request inside the core, and its states."""

from dataclasses import dataclass, field
from enum import Enum

from engine.memory.prefix import chain_hash, root_hash
from engine.sampling import SamplingParams, TokenLogprobs
from metrics.ledger import new_ledger


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One sequence. `num_computed_tokens` chases `num_tokens`; there is no prefill phase and no decode phase."""

    order: int  # of arrival: unique, and what every tie is broken by
    id: str
    prompt_tokens: int
    token_ids: list[int]  # prompt, then output
    sampling: SamplingParams
    cache_salt: str = ""
    tenant: str = ""
    priority: int = 0
    fork_of: str | None = None  # an earlier request with the same prompt, whose blocks it shares
    state: State = State.WAITING
    blocks: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    computed_high_water: int = 0  # positions below it were computed before: doing them again is recompute
    published_blocks: int = 0
    finish_reason: str | None = None
    error: str | None = None  # a sentence, where the finish reason is error
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # so far, where they are wanted
    # What the record will say.
    cached_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    first_step: int | None = None
    last_step: int | None = None
    ledger: list[int] = field(default_factory=new_ledger)
    wait_mark: tuple[int, int] = (0, 0)  # the wait clocks when it began to wait
    _hashes: list[bytes] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def output_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_tokens

    @property
    def is_prefilling(self) -> bool:
        """More than the token that was sampled last is still to compute."""
        return self.num_tokens - self.num_computed_tokens > 1

    def block_hashes(self, block_size: int, count: int) -> list[bytes]:
        """Chain hashes of the first `count` full blocks."""
        while len(self._hashes) < count:
            begin = len(self._hashes) * block_size
            parent = self._hashes[-1] if self._hashes else root_hash(self.cache_salt)
            self._hashes.append(chain_hash(parent, self.token_ids[begin : begin + block_size]))
        return self._hashes[:count]
