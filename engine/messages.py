"""What the front and the core say to each other: msgspec structs over ZeroMQ. Nothing is ever unpickled."""

import msgspec

from sojourn.engine.adapter import AdapterReference
from sojourn.engine.kv_source import KVAddress, KVSource
from sojourn.engine.sampling import SamplingParams, TokenLogprobs
from sojourn.metrics.compute.cost_model import ModelShape
from sojourn.metrics.compute.kernels import Burst
from sojourn.metrics.compute.startup import Startup
from sojourn.metrics.compute.weight_error import WeightError
from sojourn.metrics.memory.kv_load import KVLoad
from sojourn.metrics.memory.plan import MemoryPlan
from sojourn.metrics.memory.prefix_outcomes import PrefixReport
from sojourn.metrics.records import StepRecord


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
    weight: int = 1  # of its tenant, where the policy shares by tenant
    adapter: AdapterReference | None = None
    hands_over: bool = False  # a decode server will read the KV of its prompt
    transfer_id: str = ""  # a decode server may follow its prompt by this name while it is computed
    kv_source: KVSource | None = None  # a prefill server has it


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Front → core: forget this request, queued or running. Answered by `Ended`, unless it ended before."""

    request_id: str


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Front → core: end the process."""


class Profile(msgspec.Struct, frozen=True, tag=True):
    """Front → core: profile the next steps. Answered once, by `Profiled`; the front asks for one burst at a time."""

    steps: int
    timeout_ms: int  # then the burst ends with the steps that it has


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Front → core: read this adapter, and check that it fits. Answered by `AdapterLoaded`."""

    adapter: AdapterReference


class Sleep(msgspec.Struct, frozen=True, tag=True):
    """Front → core, which has no request: give back the KV pool; on a GPU copy the weights to the host. Answered by
    `Slept`."""


class Wake(msgspec.Struct, frozen=True, tag=True):
    """Front → core, which sleeps: take the memory again. Answered by `Woken`."""


ToCore = Submit | Abort | Stop | Profile | LoadAdapter | Sleep | Wake


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Core → front, once: the model is loaded."""

    model_name: str
    device: str
    dtype: str
    threads: int
    max_model_len: int
    num_kv_blocks: int
    block_size: int
    weights: str  # how most matrices are held: a dtype, int8, int4 or fp8
    weight_bytes: int
    num_parameters: int
    shape: ModelShape
    memory: MemoryPlan
    frees_window: bool = False  # requests give back blocks behind their window: the pool does not bound their length
    checkpoint_format: str | None = None  # of a quantised checkpoint: awq, gptq, gguf, …
    weight_error: WeightError | None = None  # where weights_reference asks for it
    changes_outputs: list[str] = []  # settings by which outputs differ from the model's own, as name=value
    expert_exchange: str | None = None  # of ranks with experts: all-reduce or all-to-all
    startup: Startup | None = None  # where the time of this start went; None offline
    kv_address: KVAddress | None = None  # of a prefill server

    @property
    def pool_tokens(self) -> int:
        """Prompt and output tokens of one request that the KV pool has room for."""
        return self.max_model_len if self.frees_window else self.num_kv_blocks * self.block_size


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Core → front: the core cannot start; a sentence for the user."""

    message: str


class Ended(msgspec.Struct, frozen=True):
    """How a request ended in the core, and what its record needs. The defaults stand where the core died."""

    request_id: str
    reason: str  # stop, length, abort, error; lost, if the front says it in place of the core
    booked_ns: int  # until when the ledger is booked
    ledger: list[int]
    waits: dict[str, int]  # reason → nanoseconds of `request.queue`, `memory.blocked` and `memory.preempted`
    cached_tokens: int
    computed_tokens: int
    recomputed_tokens: int = 0
    preemptions: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    rejected_ns: int = 0
    lookup_steps: int | None = None
    first_step: int | None = None
    last_step: int | None = None
    queued_ns: int | None = None  # the loop took it in
    scheduled_ns: int | None = None  # it got its first place in the batch
    error: str | None = None  # a sentence, where the reason is error
    is_peer_error: bool = False  # a prefill server caused the error, and not the request
    adapter_loads: int = 0
    kv_source: KVSource | None = None  # what it left for a decode server
    kv_load: KVLoad | None = None  # what KV tiers gave, where there are some
    prefix: PrefixReport | None = None  # unless it never got a place, or is a fork
    prompt_block_hashes: list[int] = []  # that a cache could have; of a fork its leader's
    output_block_hashes: list[int] = []  # behind them

    def ledger_now(self) -> list[int]:
        """A ledger of its own for whoever asks."""
        return list(self.ledger)


class LedgerBase(msgspec.Struct, frozen=True, array_like=True):
    """A ledger without the decode clock: add the clock's value of any later moment to it."""

    base: list[int]
    waits: dict[str, int]


class Output(msgspec.Struct, frozen=True, array_like=True):
    """One token of one request. Its ledger is booked up to the message's `committed_ns`."""

    request_id: str
    token_id: int
    ledger: LedgerBase | None = None  # where it changed since the request's last token
    finish_reason: str | None = None  # stop or length, with the last token; `Ended` follows in the next `Observed`
    logprobs: TokenLogprobs | None = None  # if the request wants them
    prompt_logprobs: list[TokenLogprobs] | None = None  # likewise, with its first token


class Tokens(msgspec.Struct, frozen=True, tag=True):
    """Core → front, as soon as a step is committed: what users wait for, and the state of the core."""

    committed_ns: int  # until when the ledgers are booked
    clock_ns: tuple[int, ...]  # the decode clock at that moment, by metrics.ledger.CLOCKED
    admitted: list[tuple[str, int]]  # requests that were given a place in the batch, and their cached prompt tokens
    outputs: list[Output]
    next_step: int  # the number of the next step
    blocks: tuple[int, int, int]  # free, active, reusable
    waiting: int
    running: int


class Observed(msgspec.Struct, frozen=True, tag=True):
    """Core → front, behind `Tokens`: what no user waits for. With telemetry each `Tokens` is followed by one."""

    step: StepRecord | None  # without its costs; None if telemetry is off, or if no step was committed
    ended: list[Ended]


class Profiled(msgspec.Struct, frozen=True, tag=True):
    """Core → front: what a profile burst saw. Without windows no step came in time."""

    burst: Burst


class AdapterLoaded(msgspec.Struct, frozen=True, tag=True):
    """Core → front: an adapter is in host memory, or it cannot be used."""

    key: str
    error: str | None  # a sentence


class KVEvents(msgspec.Struct, frozen=True, tag=True):
    """Core → front, behind `Tokens`: changes of the set of cached blocks, as routers read them."""

    batch: bytes  # of engine.kv_event_wire


class Slept(msgspec.Struct, frozen=True, tag=True):
    """Core → front: it sleeps."""

    kv_bytes: int  # of the pool that it gave back; on a CPU as far as they were written
    weight_bytes: int  # that it copied to the host


class Woken(msgspec.Struct, frozen=True, tag=True):
    """Core → front: it can compute."""


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Core → front, each second from the loop: it turns. Sent also while it has no work."""

    unreadable: int  # messages since the last beat that the core could not decode


FromCore = Ready | Failed | Tokens | Observed | Profiled | AdapterLoaded | KVEvents | Slept | Woken | Beat

encode = msgspec.msgpack.Encoder().encode
decode_to_core = msgspec.msgpack.Decoder(ToCore).decode
decode_from_core = msgspec.msgpack.Decoder(FromCore).decode
# What the decoders raise for bytes that are no message of ours. Both sides drop and count them.
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
