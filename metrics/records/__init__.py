"""The schema of the flight recorder: one record a step, one a request, one a request as its client saw it.

Everything that is shown, exported, diagnosed or tested is derived from these. Times are integer nanoseconds of the
monotonic clock, which the processes of one host share.
"""

from collections.abc import Sequence

import msgspec

from sojourn.metrics.ledger import new_ledger
from sojourn.metrics.records.step import StepRecord

__all__ = [
    "ACTIVITIES", "CLIENT_STATUSES", "COLLECTIVES", "COMPOSITIONS", "KINDS", "LEASE_ENDS", "MOST_DRAFTS", "NO_END",
    "PROMPT_KINDS", "REFUSALS", "STAGES", "UNDRAFTED", "WAITS", "ClientRecord", "KernelRecord", "KvEventRecord",
    "RequestRecord", "StepRecord", "SystemRecord", "composition",
]  # fmt: skip

# publish: tokens are sent, and the index of blocks learns of the step. Its record is made and sent after that, with the
# ends of its requests: the next turn has begun by then, and `receive` has that time.
STAGES = ("receive", "schedule", "prepare", "launch", "wait", "sample", "commit", "publish")
KINDS = ("prefill", "recompute", "decode", "verify")
PROMPT_KINDS = ("prefill", "recompute")
COMPOSITIONS = ("prefill", "decode", "mixed")  # a step has only prompts in it, none, or both
# policy: it admits nobody now, or no more long prompts. leader: a fork waits for its leader's prompt.
REFUSALS = (
    "batch_cap", "token_budget", "kv_blocks", "behind_head", "policy", "leader", "grammar", "kv_load", "adapter",
    "quota", "kv_transfer",
)  # fmt: skip
# What a request waited for: what the head of the line was refused for, what it was held aside for, or the end of a step
# that was under way when it came or got its place.
WAITS = ("batch_cap", "token_budget", "kv_blocks", "policy", "leader", "grammar", "adapter", "step")
# Why a request that sampled was given no drafts: few were accepted; the step would be longer than they are worth; no
# free blocks; its next token is the last.
UNDRAFTED = ("acceptance", "step_time", "memory", "last_token")
LEASE_ENDS = ("released", "expired")  # of the KV that a prefill server holds: given back by its reader, or not in time
COLLECTIVES = ("all_reduce", "all_gather", "all_to_all", "broadcast", "send", "recv")
ACTIVITIES = ("busy", "communication", "bubble")  # of a rank in a step
MOST_DRAFTS = 16  # of a request in one step
CLIENT_STATUSES = ("ok", "error", "timeout", "cancelled", "missing")
NO_END = "no end was recorded: never sent, or the load generator was killed"  # the error of what is missing


def composition(kinds: Sequence[str]) -> str:
    """What a step was made of, of COMPOSITIONS. Rebuilding KV is prompt work; verifying drafts is decoding."""
    prompts = sum(map(kinds.count, PROMPT_KINDS))
    if not prompts:
        return "decode"
    return "prefill" if prompts == len(kinds) else "mixed"


class RequestRecord(msgspec.Struct, frozen=True):
    """One request as the server saw it: at finish, abort or error. Ledgers are nanoseconds by `ledger.Account`."""

    request_id: str
    arrived_ns: int
    finished_ns: int
    tenant: str = ""
    klass: str = ""
    finish_reason: str | None = None  # stop, length, abort, content_filter; None with an error
    error: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt
    computed_tokens: int = 0  # of prompt and output, the first time: cached + computed = prompt + output - 1 at the end
    recomputed_tokens: int = 0  # of prompt and output, computed again after a preemption
    output_tokens: int = 0
    prompt_characters: int = 0  # of prompts that were sent as text, or as messages: with the template around them
    output_characters: int = 0  # of text that was given to the client
    drafted_tokens: int = 0  # that steps verified; computed_tokens has the accepted ones only
    accepted_tokens: int = 0
    rejected_ns: int = 0  # of ledger_compute_decode_ns: what the rejected drafts of its steps took, also of others
    # Of a sample of the finished requests: the steps that the output would have taken, had each verified four tokens of
    # prompt lookup. Without any accepted draft they are as many as the output tokens.
    lookup_steps: int | None = None
    preemptions: int = 0
    # What the prefix cache made of the prompt (metrics.memory.prefix_outcomes); empty if it never got a place.
    prefix_outcomes: dict[str, int] = msgspec.field(default_factory=dict)  # outcome → tokens; sum: the prompt
    # What a cache without eviction would have hit: hit + miss_evicted + miss_disabled. None: the server does not tell.
    infinite_hit_tokens: int | None = None
    diverged_at: int | None = None  # the token at which it left the known prompts with which it began
    evicted_by: dict[str, int] = msgspec.field(default_factory=dict)  # whose need took miss_evicted → tokens
    evicted_ago_ns: int | None = None  # how long before miss_evicted was taken, of the first block that was missed
    resized_hit_tokens: list[int] = msgspec.field(default_factory=list)  # by pools of RATIOS this size
    prefix_source: str | None = None  # the request before it whose prompt and output begin most like this prompt
    prefix_shared_tokens: int = 0  # tokens that both prompts begin with, of blocks or not; a whole prompt may be shared
    # metrics.memory.prompt_repeats: tokens that earlier prompts had at any place; of those, parts that they have in
    # common behind something that differs, so that they could stand before it. None beyond 100 prompts a second.
    repeated_tokens: int | None = None
    movable_tokens: int | None = None
    # metrics.memory.pooled_cache: chain hashes of full blocks, the same on all servers: the first 64 bits, signed. Of
    # the prompt without its last token, and of what follows: its last block and the output. [] with an older server.
    prompt_block_hashes: list[int] = msgspec.field(default_factory=list)
    output_block_hashes: list[int] = msgspec.field(default_factory=list)
    # metrics.memory.kv_load: what KV tiers gave, and whether loading or computing again was predicted to be cheaper.
    loaded_tokens: dict[str, int] = msgspec.field(default_factory=dict)  # tier → tokens of the prompt
    load_decision: str | None = None  # load, recompute; None where no tier had a part of the prefix
    load_predicted_ns: int | None = None
    recompute_predicted_ns: int | None = None
    load_ns: int = 0  # it waited for reads of a slow tier before it could be scheduled: a part of memory.load
    # KV between servers: bytes that it read from a prefill server, or that were held for a decode server; and how long
    # the reads took, one by one. What it waited for them is memory.transfer.
    transfer_bytes: int = 0
    transfer_ns: int = 0
    first_step: int | None = None
    last_step: int | None = None
    token_ns: list[int] = msgspec.field(default_factory=list)  # when each output token left the loop
    written_ns: int | None = None  # last byte handed to the socket
    first_written_ns: int | None = None  # first text handed to the socket
    encoded_ns: int | None = None  # its prompt was ready, in the front
    queued_ns: int | None = None  # the scheduler saw it first
    scheduled_ns: int | None = None  # it got its first place in the batch
    longest_output_tokens: int = 0  # of its choices
    traceparent: str | None = None  # the caller's span, as the header of that name has it
    ledger: list[int] = msgspec.field(default_factory=new_ledger)  # up to the last byte
    ttft: list[int] = msgspec.field(default_factory=new_ledger)  # up to the first text
    # One of WAITS → nanoseconds: sums to what `ledger` has in request.queue, memory.blocked and memory.preempted.
    waits: dict[str, int] = msgspec.field(default_factory=dict)
    # The front's own work for this request, without any wait: a part of its accounts, so that the cost of a character
    # or a token is known also where the accounts hold time that other requests cost. None with an older server.
    encoding_ns: int | None = None  # template and tokenizer
    decoding_ns: int | None = None  # ids → text
    writing_ns: int | None = None  # handing chunks to the socket, with waits for a reader whose buffers are full
    adapter: str | None = None  # the LoRA adapter that it named
    adapter_loads: int = 0  # into a slot, for this request
    session: str | None = None  # the header x-session-id
    server: str | None = None  # of a fleet: set where the records of its servers become one run


class ClientRecord(msgspec.Struct, frozen=True):
    """One request as its client saw it, timed from `due_ns`, the moment when it was meant to be sent."""

    request_id: str
    scenario: str
    due_ns: int
    status: str
    tenant: str = ""
    klass: str = ""
    session_id: str = ""
    turn: int = 0
    sent_ns: int | None = None
    first_token_ns: int | None = None  # first chunk with text
    last_byte_ns: int | None = None
    error: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    chunk_ns: list[int] = msgspec.field(default_factory=list)  # when each chunk with text was read
    chunk_tokens: list[int] = msgspec.field(default_factory=list)  # new tokens in each; [] where unknown
    first_answer_ns: int | None = None  # first chunk with more than reasoning
    last_token_ns: int | None = None  # last chunk with text, in an imported result that has no time of each chunk


class SystemRecord(msgspec.Struct, frozen=True):
    """One second of the machine. `None` where this machine has no such sensor. CPU seconds are user and system time
    since the process began."""

    ns: int
    host_cpu_percent: float  # what it worked itself, of all cores together: 0 to 100
    front_cpu_percent: float | None  # of one core: may exceed 100
    core_cpu_percent: float | None
    core_rss_bytes: int | None
    host_available_bytes: int | None
    gpu_utilisation_percent: float | None = None
    gpu_memory_used_bytes: int | None = None
    gpu_power_watts: float | None = None
    gpu_sm_clock_mhz: float | None = None
    gpu_memory_clock_mhz: float | None = None
    gpu_temperature_celsius: float | None = None
    gpu_throttle_reasons: list[str] | None = None  # why the clock is below the requested one: sampler.THROTTLE_REASONS
    cpu_power_watts: float | None = None  # of all packages, mean since the sample before
    front_cpu_seconds: float | None = None
    core_cpu_seconds: float | None = None
    front_rss_bytes: int | None = None
    host_steal_percent: float | None = None  # of all cores together: what the hypervisor gave to other machines
    # Since the process began, where the kernel counts it: of its main thread, which runs the loop, the time on a core
    # and the time in the run queue (it could run, and no core was free); of all its threads, the time in the run queue.
    front_loop_cpu_ns: int | None = None
    front_loop_queued_ns: int | None = None
    front_queued_ns: int | None = None
    front_involuntary_switches: int | None = None  # of the main thread: another thread got its core
    core_loop_cpu_ns: int | None = None
    core_loop_queued_ns: int | None = None
    core_queued_ns: int | None = None
    core_involuntary_switches: int | None = None
    cpu_pressure_percent: float | None = None  # of the time, with some thread of the machine waiting for a core
    # Turns of the front's event loop of at least loop_watch.TURN_NS since the sample before: nobody else was served
    # meanwhile. `loop_busy_ns` is the time of all turns since the server began.
    loop_turn_begin_ns: list[int] = []
    loop_turn_ns: list[int] = []
    loop_busy_ns: int | None = None
    # Since the sample before, of the processes that are not the server's: `name (pid)` of those with most of the CPUs
    # and their cores. Empty where others take less than a quarter of a core.
    neighbours: list[str] = []
    neighbour_cores: list[float] = []


class KernelRecord(msgspec.Struct, frozen=True):
    """What the kernels of one name took of one step of a profile burst. Over all rows of a burst, gaps included, the
    times sum to its wall time: where kernels overlap, the time is that of the one that began last."""

    step: int
    klass: str  # one of kernels.CLASSES
    name: str
    count: int
    total_ns: int
    begin_ns: int  # of the first


class KvEventRecord(msgspec.Struct, frozen=True):
    """A change of what a server has cached, from its KV events or from a probe. Hashes of blocks, and no token."""

    ns: int
    kind: str  # stored, removed, cleared (all blocks), lost (messages that nobody could be asked for again)
    hashes: list[int] = []  # 64 bits, signed. Stored: a chain, each the parent of the next
    parent: int | None = None  # hash before the first of `hashes`; None where it begins a sequence
    block_size: int = 0  # tokens
    medium: str = "GPU"  # GPU: the device; CPU; STORAGE
    request: str | None = None  # stored: it computed them; removed: it needed their room
    session: str | None = None
    server: str | None = None
    batch: int | None = None  # number of its message; of `lost` the first one
    lost: int = 0  # messages
