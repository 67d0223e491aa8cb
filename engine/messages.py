"""What the front and the core say to each other: msgspec structs over ZeroMQ. Nothing is ever unpickled."""

import msgspec

from engine.sampling import SamplingParams, TokenLogprobs
from metrics.compute.cost_model import ModelShape
from metrics.compute.kernels import Burst
from metrics.memory.prefix_outcomes import PrefixReport
from metrics.records import STAGES
from metrics.steps import Makeup, Others


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Front → core: compute this request."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    encoded_ns: int  # when its prompt was ready: end of token.encode
    cache_salt: str = ""
    tenant: str = ""  # whose fair share it uses
    priority: int = 0  # lower goes first, where the policy asks
    fork_of: str | None = None  # an earlier request with the same prompt, whose blocks it shares


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Front → core: forget this request, queued or running. Answered by `Ended`, unless it ended before."""

    request_id: str


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Front → core: end the process."""


class Profile(msgspec.Struct, frozen=True, tag=True):
    """Front → core: profile the next steps. Answered once, by `Profiled`; the front asks for one burst at a time."""

    steps: int
    timeout_ms: int  # then the burst ends with the steps that it has


ToCore = Submit | Abort | Stop | Profile


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Core → front, once: the model is loaded."""

    model_name: str
    device: str
    dtype: str
    threads: int
    max_model_len: int
    num_kv_blocks: int
    block_size: int
    weights: str  # how matrices are held: a dtype or int8
    weight_bytes: int
    num_parameters: int
    shape: ModelShape


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Core → front: the core cannot start; a sentence for the user."""

    message: str


class Ended(msgspec.Struct, frozen=True):
    """How a request ended in the core, and what its record needs. What a core that died took along is left out."""

    request_id: str
    reason: str  # stop, length, abort, error; lost, if the front says it in place of the core
    booked_ns: int  # until when the ledger is booked
    ledger: list[int]
    waits: dict[str, int]  # reason → nanoseconds of `request.queue`, `memory.blocked` and `memory.preempted`
    cached_tokens: int
    computed_tokens: int
    recomputed_tokens: int = 0
    preemptions: int = 0
    first_step: int | None = None
    last_step: int | None = None
    queued_ns: int | None = None  # the loop took it in
    scheduled_ns: int | None = None  # it got its first place in the batch
    error: str | None = None  # a sentence, where the reason is error
    prefix: PrefixReport | None = None  # unless it never got a place, or is a fork

    def ledger_now(self) -> list[int]:
        """A ledger of its own for whoever asks."""
        return list(self.ledger)


class Standing(msgspec.Struct, frozen=True, array_like=True):
    """What a ledger holds beside the decode clock, whose reading of any later moment is to be added to it."""

    base: list[int]
    waits: dict[str, int]


class Output(msgspec.Struct, frozen=True, array_like=True):
    """One token of one request, whose ledger is booked up to the message's `committed_ns`."""

    request_id: str
    token_id: int
    standing: Standing | None = None  # where it changed since the token before
    finish_reason: str | None = None  # of its last one: stop or length. `Ended` follows, when there is time for it
    logprobs: TokenLogprobs | None = None  # if the request wants them
    prompt_logprobs: list[TokenLogprobs] | None = None  # ... with its first token


# What is told of every step, as it was read: when the stages of its turn began, the last one with its commit, the
# device's times, and when it was decided. What it means is worked out in the front, for many steps at once.
STEP_ROW = (*(f"{stage}_began_ns" for stage in STAGES), "device_begin_ns", "device_end_ns", "sampling_ns", "planned_ns")
# Of a step that is not steady, more. A steady one is the step before once more: all emit a token, nobody waits, the
# device had been idle since that step, and this one began where that one ended.
STEP_MARK = (
    "row", "step", "ended_before_ns", "idle_since_ns", "emitted_tokens", "padding_tokens", "logit_rows", "budget",
    "waiting", "overrun_tokens",
)  # fmt: skip
# How the pool stood, where that changed. Else it was as before, but for one more slot written of each sequence.
POOL_MARK = (
    "row", "blocks_free", "blocks_active", "blocks_reusable", "blocks_pinned", "evicted_so_far", "slots_written",
)  # fmt: skip


class ToldSteps(msgspec.Struct, frozen=True, array_like=True):
    """Steps that are over, in their order. Rows are counted from the first of them, which has marks of both kinds. A
    graph among `others` stands up to the next mark."""

    rows: bytes  # STEP_ROW of each, int64
    ended_ns: int  # the last one
    marks: list[tuple[int, ...]]  # STEP_MARK
    pools: list[tuple[int, ...]]  # POOL_MARK
    makeups: list[Makeup]  # of a step that has none the same requests decoded one token more each
    others: Others
    carried: list[tuple[int, int, list[int]]]  # row, begin of the first turn before its own, stages of those turns
    forgotten: list[tuple[int, int]]  # row, blocks that the shadow index has forgotten


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """Core → front, after each step, and when the core falls idle.

    A request that ends with a token says so there, and is in `ended` of a later message.
    """

    committed_ns: int  # until when the ledgers are booked
    reading: tuple[int, ...]  # of the decode clock then, by metrics.ledger.CLOCKED
    admitted: list[tuple[str, int]]  # requests that were given a place in the batch, and their cached prompt tokens
    outputs: list[Output]
    ended: list[Ended]
    steps: ToldSteps | None  # with some messages
    untold_steps: int  # that were computed, and come with a later one
    next_step: int  # the number of the next one
    blocks: tuple[int, int, int, int]  # free, active, reusable, pinned, now
    waiting: int
    running: int


class Profiled(msgspec.Struct, frozen=True, tag=True):
    """Core → front: what a profile burst saw. Without windows no step came in time."""

    burst: Burst


FromCore = Ready | Failed | Outputs | Profiled

encode = msgspec.msgpack.Encoder().encode
decode_to_core = msgspec.msgpack.Decoder(ToCore).decode
decode_from_core = msgspec.msgpack.Decoder(FromCore).decode
