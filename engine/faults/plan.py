"""The setting `faults`: which faults are planted, and how severe they are.

`slow_tokeniser:ms=20,by=sleep;core_death:at_s=5` plants two. FAULTS lists them all with their values and bounds.
"""

import difflib
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Milliseconds = Annotated[float, Field(ge=0, le=60_000)]
Share = Annotated[float, Field(gt=0, le=1)]
Way = Literal["cpu", "sleep"]


class Fault(BaseModel):
    """One fault. It acts from `from_s` until `until_s`, in seconds after the first request."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    process: ClassVar[Literal["front", "core"]]

    from_s: float = Field(0, ge=0, le=86_400)
    until_s: float | None = Field(None, gt=0, le=86_400)

    @model_validator(mode="after")
    def _begins_before_its_end(self):
        if self.until_s is not None and self.until_s <= self.from_s:
            raise ValueError(f"until_s={self.until_s:g} is not after from_s={self.from_s:g}; raise it")
        return self


class FrontFault(Fault):
    process = "front"


class CoreFault(Fault):
    process = "core"


class _Costs(BaseModel):
    """Time that a call takes longer: by work on a processor core, or by sleep. Either holds the thread of the call."""

    by: Way = "cpu"

    @model_validator(mode="after")
    def _costs_something(self):
        fields = [name for name in type(self).model_fields if name in ("ms", "us_per_token", "us_per_row")]
        if not any(getattr(self, name) for name in fields):
            raise ValueError(f"costs no time; give {' or '.join(fields)} a value above 0")
        return self


class SlowTokeniser(_Costs, FrontFault):
    """Each prompt takes longer to encode, on the event loop like the tokeniser itself."""

    ms: Milliseconds = 0
    us_per_token: float = Field(0, ge=0, le=1_000_000)


class SlowDetokeniser(_Costs, FrontFault):
    """Each output token takes longer to become text, on the event loop."""

    ms: Milliseconds = 0


class EventLoopBlock(_Costs, FrontFault):
    """Synchronous work holds the front's event loop, again and again."""

    ms: Milliseconds = 0
    every_ms: float = Field(ge=1, le=60_000)


class SlowWrites(_Costs, FrontFault):
    """Each write to a socket takes longer, for a share of the calls. By sleep, only that call waits."""

    by: Way = "sleep"
    ms: Milliseconds = 0
    share: Share = 1


class SlowModeration(_Costs, FrontFault):
    """Each check of an input takes longer. It needs the setting moderation. By sleep, only that call waits."""

    by: Way = "sleep"
    ms: Milliseconds = 0


class ConnectionResets(FrontFault):
    """A share of the answers loses its connection after so many writes."""

    share: Share
    after_writes: int = Field(3, ge=0, le=1_000_000)


class SlowHost(_Costs, CoreFault):
    """A stage of the loop takes longer in each step."""

    stage: Literal["schedule", "prepare", "commit"] = "schedule"
    ms: Milliseconds = 0


class SlowSampler(_Costs, CoreFault):
    """Sampling takes longer: in each step, and for each row of it."""

    ms: Milliseconds = 0
    us_per_row: float = Field(0, ge=0, le=1_000_000)


class SlowDevice(CoreFault):
    """The model takes `factor` times as long: in all steps, in those with prompts, or in those without."""

    factor: float = Field(gt=1, le=1_000)
    steps: Literal["all", "prompts", "decodes"] = "all"
    by: Way = "cpu"


class SlowAttention(CoreFault):
    """Attention is computed `times` times: a bad kernel, whose cost grows with the context."""

    times: int = Field(ge=2, le=1_000)


class BlockLeak(CoreFault):
    """Requests that end keep some of their KV blocks for ever, until the leak has `most` of the pool."""

    on: Literal["abort", "finish", "both"] = "both"
    blocks: int = Field(ge=1, le=100_000, description="of each request, at most all that it has")
    most: float = Field(0.9, gt=0, le=0.95, description="share of the pool that leaks at most")


class SlowKvDisk(CoreFault):
    """Each read of a KV block from the disk tier takes longer, in the thread that reads."""

    ms: Milliseconds = Field(gt=0)


class SlowLink(CoreFault):
    """Each exchange between ranks takes longer, as over a slow link. It needs a parallel group."""

    ms: Milliseconds = Field(gt=0)


class RankFault(CoreFault):
    """Planted in the process of a rank, whichever it is."""


class SlowRank(_Costs, RankFault):
    """One rank of a parallel group takes longer for its part of each step. It needs a parallel group."""

    rank: int = Field(ge=0, le=10_000)
    ms: Milliseconds = 0


class SkewedRouter(RankFault):
    """A share of the tokens chooses the first experts of each mixture. It needs a model with routed experts."""

    share: Share


class BadDrafts(CoreFault):
    """A share of the drafts is wrong: steps verify them in vain. It needs the setting speculation."""

    share: Share


class CoreDeath(CoreFault):
    """The core process ends without a word, so many seconds after its first request. A later core lives."""

    at_s: float = Field(ge=0, le=86_400)

    @model_validator(mode="after")
    def _has_one_moment(self):
        if self.from_s or self.until_s is not None:
            raise ValueError("has one moment, at_s; leave from_s and until_s out")
        return self


FAULTS: dict[str, type[Fault]] = {
    "slow_tokeniser": SlowTokeniser,
    "slow_detokeniser": SlowDetokeniser,
    "event_loop_block": EventLoopBlock,
    "slow_writes": SlowWrites,
    "slow_moderation": SlowModeration,
    "connection_resets": ConnectionResets,
    "slow_host": SlowHost,
    "slow_sampler": SlowSampler,
    "slow_device": SlowDevice,
    "slow_attention": SlowAttention,
    "block_leak": BlockLeak,
    "slow_kv_disk": SlowKvDisk,
    "slow_link": SlowLink,
    "slow_rank": SlowRank,
    "skewed_router": SkewedRouter,
    "core_death": CoreDeath,
    "bad_drafts": BadDrafts,
}


def planned(text: str) -> list[Fault]:
    """The faults of the setting, in their order. Raises ValueError with a sentence for the first that is wrong."""
    parts = [part.strip() for part in text.split(";") if part.strip()]
    if not parts:
        raise ValueError("it names no fault; give one such as slow_tokeniser:ms=20, or leave the setting out")
    return [_fault(part) for part in parts]


def _fault(part: str) -> Fault:
    name, _, pairs = part.partition(":")
    name = name.strip()
    if name not in FAULTS:
        close = difflib.get_close_matches(name, FAULTS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(FAULTS)}"
        raise ValueError(f"{name!r} is no fault; {hint}")
    values: dict[str, str] = {}
    for pair in filter(None, (pair.strip() for pair in pairs.split(","))):
        key, equals, value = (word.strip() for word in pair.partition("="))
        if not equals or not key or not value:
            raise ValueError(f"{name}: {pair!r} is not KEY=VALUE, such as ms=20")
        if key in values:
            raise ValueError(f"{name}: {key} stands twice; keep one")
        values[key] = value
    try:
        return FAULTS[name](**values)
    except ValidationError as error:
        raise ValueError(f"{name}: {_complaint(error, FAULTS[name])}") from None


def _complaint(invalid: ValidationError, kind: type[Fault]) -> str:
    first = invalid.errors(include_url=False)[0]
    name = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return f"{name} is none of its values; it has {', '.join(sorted(kind.model_fields))}"
    if first["type"] == "missing":
        return f"{name} is missing; add it"
    message = first["msg"].removeprefix("Value error, ")
    if not name:
        return message
    return f"{name}={first['input']} is not valid: {message[0].lower()}{message[1:]}"
