"""A request inside the core, and its states."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from sojourn.engine.adapter import AdapterReference
from sojourn.engine.memory.prefix import chain_hash, root_hash
from sojourn.engine.request.booking import Booking, Counts
from sojourn.engine.sampling import SamplingParams, TokenLogprobs, reads_output


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One sequence. `num_computed_tokens` chases `num_tokens`; there is no prefill phase and no decode phase.

    A step is planned before the one before it is read. So positions count as computed when they are planned, and
    `num_unread_tokens` are sampled on the device, but not known yet. `num_committed_tokens` counts the positions of
    steps that were read.
    """

    arrival_index: int  # unique: it breaks every tie
    id: str
    prompt_tokens: int
    token_ids: list[int]  # prompt, then output
    sampling: SamplingParams
    cache_salt: str = ""
    tenant: str = ""
    weight: int = 1  # of its tenant
    priority: int = 0
    fork_of: str | None = None  # an earlier request with the same prompt, whose blocks it shares
    adapter: AdapterReference | None = None
    state: State = State.WAITING
    blocks: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_committed_tokens: int = 0
    num_unread_tokens: int = 0
    computed_high_water: int = 0  # positions below it were computed before: computing them again is recompute
    published_blocks: int = 0
    drafts: tuple[int, ...] = ()  # that may follow its known tokens; the next step verifies them
    hole_end: int = 0  # index in `blocks`: of those before it only the sinks' are not given back; see FreedWindow
    first_changed_block: int = 0  # index in `blocks`, since a runner last copied them
    forked: bool = False  # its next position may be in a block that other requests read
    side_queue: str | None = None  # the reason, where it waits outside of the policy's queue
    finish_reason: str | None = None
    error: str | None = None  # a sentence, where the finish reason is error
    is_peer_error: bool = False  # a prefill server caused the error
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # so far, where they are wanted
    parts: dict[str, Any] = field(default_factory=dict)  # technique → what it knows of the request
    counts: Counts = field(default_factory=Counts)
    booking: Booking = field(default_factory=Booking)
    needs_output: bool = field(init=False)  # the host must know every token before the next one is sampled
    _hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.needs_output = reads_output(self.sampling)

    @property
    def root_hash(self) -> bytes:
        """Parent of its first block's hash."""
        return root_hash(self.cache_salt, "" if self.adapter is None else self.adapter.key)

    @property
    def num_tokens(self) -> int:
        """Known and unread."""
        return len(self.token_ids) + self.num_unread_tokens

    @property
    def output_tokens(self) -> int:
        """Known tokens."""
        return len(self.token_ids) - self.prompt_tokens

    @property
    def is_at_max_tokens(self) -> bool:
        """Its unread token is the last of `max_tokens`."""
        return self.num_unread_tokens > 0 and self.num_tokens - self.prompt_tokens >= self.sampling.max_tokens

    @property
    def is_prefilling(self) -> bool:
        """There is more to compute than the token that was sampled last."""
        done = self.num_computed_tokens
        return len(self.token_ids) + self.num_unread_tokens - done > 1 or done < self.prompt_tokens

    @property
    def has_computed_prompt(self) -> bool:
        return self.num_committed_tokens >= self.prompt_tokens

    @property
    def reads_cache(self) -> bool:
        """A prompt whose tokens are scored is computed from its beginning."""
        return self.sampling.prompt_logprobs is None

    def ending(self, token_id: int, output_tokens: int) -> str | None:
        """The finish reason of a token with which the output has so many; None where the request goes on."""
        sampling = self.sampling
        if not sampling.ignore_eos and token_id in sampling.stop_token_ids:
            return "stop"
        return "length" if output_tokens >= sampling.max_tokens else None

    def until_end(self, tokens: list[int]) -> list[int]:
        """Of tokens that follow the known ones: those up to the one that ends the request, if one does."""
        for count, token_id in enumerate(tokens[:-1], 1):
            if self.ending(token_id, self.output_tokens + count) is not None:
                return tokens[:count]
        return tokens

    def shares_prompt_with(self, leader: "Request") -> bool:
        """Whether the leader's KV, and its scores of the prompt if they are wanted, are this request's too."""
        count = self.prompt_tokens
        return (
            leader.prompt_tokens == count
            and leader.cache_salt == self.cache_salt
            and leader.adapter == self.adapter
            and self.sampling.prompt_logprobs in (None, leader.sampling.prompt_logprobs)
            and leader.token_ids[:count] == self.token_ids[:count]
        )

    def block_hashes(self, block_size: int, count: int) -> list[bytes]:
        """Chain hashes of the first `count` full blocks."""
        while len(self._hashes) < count:
            begin = len(self._hashes) * block_size
            parent = self._hashes[-1] if self._hashes else self.root_hash
            self._hashes.append(chain_hash(parent, self.token_ids[begin : begin + block_size]))
        return self._hashes[:count]

    @property
    def known_hashes(self) -> list[bytes]:
        """Those that a lookup or a full block has asked for so far."""
        return self._hashes

    def share_hashes(self, leader: "Request", block_size: int, count: int) -> None:
        """Takes over the leader's hashes: many forks fill their next blocks in the same step."""
        if len(self._hashes) < count:
            self._hashes = leader.block_hashes(block_size, count)

    def reusable_hashes(self, block_size: int) -> list[bytes]:
        """Chain hashes of the blocks that need no work if they are cached.

        The last position is always computed: its logits give the next token.
        """
        if not self.reads_cache:
            return []
        return self.block_hashes(block_size, (self.num_tokens - 1) // block_size)
