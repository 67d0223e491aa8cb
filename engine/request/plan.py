"""The plan of a step, its outcome, and the runner that executes it: shared by scheduler, loop and runner."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from sojourn.engine.request.request import Request
from sojourn.engine.sampling import TokenLogprobs


class ScheduledTokens(NamedTuple):
    """The share of one request in a step: positions `past_tokens` to `past_tokens + new_tokens`.

    With drafts (kind `verify`) these are the last known token and the drafts, and each of these positions samples.
    """

    request: Request
    new_tokens: int
    past_tokens: int
    kind: str  # one of metrics.records.KINDS
    samples: bool  # its last position is the last known one, so that the next token can be sampled
    drafts: tuple[int, ...] = ()

    @property
    def is_prompt(self) -> bool:
        """Prompt work, also of KV that is rebuilt. Verifying drafts is decoding."""
        return self.kind in ("prefill", "recompute")


def next_tokens(request: Request, new_tokens: int) -> ScheduledTokens:
    """The share of a request that goes on where it is."""
    past = request.num_computed_tokens
    if past < request.computed_high_water:
        kind = "recompute"
    else:
        kind = "prefill" if past < request.prompt_tokens else "decode"
    return ScheduledTokens(request, new_tokens, past, kind, samples=past + new_tokens == request.num_tokens)


class Preemption(NamedTuple):
    """A running request that lost its blocks."""

    request: Request
    wanted_by: str  # id of the request that needed blocks: itself, if it could not grow and no other could be preempted
    computed_tokens: int  # positions whose keys and values it lost; some may be found again by their prefix


@dataclass(slots=True)
class StepPlan:
    """What one step computes, and why it computes no more."""

    budget: int
    budget_left: int
    scheduled: list[ScheduledTokens] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Preemption] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # KV blocks, from and to, before the step computes
    refusals: dict[str, int] = field(default_factory=dict)  # reason → waiting requests, the head's first
    head_blocked_by: str | None = None  # the reason that refused the head of the queue
    num_waiting: int = 0
    side_queue_moves: list[tuple[Request, str | None]] = field(default_factory=list)  # None: back to the queue
    needs_commit: bool = False  # the next step cannot be planned before this one is committed
    wanted: dict[str, int] = field(default_factory=dict)  # request id → drafts for the next step at most
    undrafted: dict[str, int] = field(default_factory=dict)  # reason → requests that sample, for which none are wanted
    num_drafts: int = 0
    follows: bool = False  # since the step before there was work all the time
    planned_ns: int = 0  # when it was decided, with telemetry on
    parts: dict[str, Any] = field(default_factory=dict)  # technique → what its part of the runner does for the step
    has_prompts: bool = False  # it may hold other work than decoding and verifying drafts

    def add(self, item: ScheduledTokens) -> None:
        self.scheduled.append(item)
        self.budget_left -= item.new_tokens
        self.num_drafts += len(item.drafts)

    def has_preempted(self, request: Request) -> bool:
        return any(preemption.request is request for preemption in self.preempted)

    def drop(self, request: Request) -> None:
        """Takes back what was planned for a request that is preempted, while it still has its blocks."""
        self.copies = [copy for copy in self.copies if copy[1] not in request.blocks]
        for item in self.scheduled:
            if item.request is request:
                self.scheduled.remove(item)
                self.budget_left += item.new_tokens
                self.num_drafts -= len(item.drafts)
                return


class LaunchedStep(NamedTuple):
    """A step under way."""

    plan: StepPlan
    prepared_ns: int
    launched_ns: int
    state: Any  # of the runner that launched it


@dataclass(slots=True)  # not frozen: that would set each field through a call
class StepOutcome:
    """The results of a step, and readings of the host's clock, also for the device."""

    sampled: dict[str, list[int]]  # request id → accepted drafts and one more token, up to one that ends the request
    waited_ns: int  # the logits were ready; not before the wait began
    sampled_ns: int  # the tokens were ready
    device_begin_ns: int
    device_end_ns: int
    sampling_ns: int  # the last part of the device time; about 0 where a graph drew the tokens: they are its kernels
    padding_tokens: int = 0
    graph: str = "eager"
    load_ns: int = 0  # of the device's time, before the forward pass: KV blocks that came from host memory
    store_ns: int = 0  # of the device's time, before the forward pass: KV blocks that went to host memory
    communication_ns: int = 0  # of the device's time before the sampling: exchanges between ranks
    bubble_ns: int = 0  # of the device's time before the sampling: waiting for the pipeline stages behind the first
    expert_tokens: list[int] = field(default_factory=list)  # by routed expert, of a sample of the steps
    expert_imbalance_percent: list[int] = field(
        default_factory=list
    )  # by layer, of the same steps: the most over the mean
    logit_rows: int = 0  # that were computed: of sampled tokens, and of scored prompt tokens
    entropy_millinats: list[int] = field(default_factory=list)  # of the entropy sample
    nucleus_mass_ppm: list[int] = field(
        default_factory=list
    )  # of the entropy sample: what truncation left of its distribution
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)  # of sampled tokens, where they are wanted
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)  # of this step's prompt tokens
    # Requests that the runner finishes, after their sampled token if any: finish reason, and a sentence for error.
    finishes: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    parts: dict[str, Any] = field(default_factory=dict)  # technique → what its part of the runner found
    drafts: dict[str, tuple[int, ...]] = field(default_factory=dict)  # for the next step
    draft_ns: int = 0  # of the proposer: behind device_end_ns, before sampled_ns
    draft_flops: int = 0
    draft_bytes: int = 0

    @property
    def device_ns(self) -> int:
        return self.device_end_ns - self.device_begin_ns

    @property
    def parts_ns(self) -> tuple[int, ...]:
        """By metrics.ledger.STEP_PARTS. All but the drafts are of the device's time."""
        return (
            self.sampling_ns, self.draft_ns, self.load_ns, self.store_ns, self.communication_ns, self.bubble_ns,
        )  # fmt: skip


class Preparation(Protocol):
    """A runner's work for a request before it may be scheduled. It runs beside the loop."""

    is_done: bool
    ready_ns: int  # when it was done
    error: str | None  # a sentence, if it failed
    waits_for: str  # one of metrics.records.REFUSALS: grammar or adapter
    adapter_ready_ns: int | None  # when the weights of the request's adapter were in host memory; None: it has none


class Runner(Protocol):
    """Executes plans: `launch` queues device work and returns at once, `collect` waits for its result.

    Steps are collected in the order of their launch. Two may be under way: the second one reads the
    first one's tokens on the device.
    """

    stores_beside_steps: bool  # full blocks may be stored while a step computes, without a wait for it

    def begin(self, request: Request) -> Preparation | None:
        """A request arrived. None: it may be scheduled at once. Else it waits for the preparation."""

    def launch(self, plan: StepPlan) -> LaunchedStep: ...

    def collect(self, step: LaunchedStep) -> StepOutcome: ...

    def between_steps(self, name: str, work: Any) -> Any:
        """Has the computing half of a technique do something that no step does."""

    def forget(self, request_id: str) -> None:
        """A request ended: its state goes. Unknown ids are ignored."""

    def close(self) -> None:
        """No more steps come: other processes that compute end."""
