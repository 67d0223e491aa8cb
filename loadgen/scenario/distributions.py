"""What the blocks of a scenario file are made of: checked numbers, and distributions of lengths, times and turns.

A number in the place of a distribution means a fixed value.
"""

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

MAX_ZIPF_LENGTHS = 1_000_000
MOST_TOKENS = 10_000_000
MOST_SECONDS = 86_400
MOST_TURNS = 1_000


def _no_truth_value(value: Any) -> Any:
    if isinstance(value, bool):  # to Python, true is the number 1
        raise ValueError(f"is {str(value).lower()}; it must be a number, not true or false")
    return value


Whole = Annotated[int, BeforeValidator(_no_truth_value)]
Number = Annotated[float, BeforeValidator(_no_truth_value)]


class Block(BaseModel):
    """Frozen; refuses keys that it does not know, and numbers that are not finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _number_is_fixed(key: str) -> BeforeValidator:
    def number_means_fixed(value: Any) -> Any:
        return {"distribution": "fixed", key: value} if isinstance(value, bool | int | float) else value

    return BeforeValidator(number_means_fixed)


Tokens = Annotated[Whole, Field(ge=1, le=MOST_TOKENS)]
Weight = Annotated[Number, Field(ge=0)]


class Fixed(Block):
    distribution: Literal["fixed"]
    tokens: Whole = Field(ge=1, le=MOST_TOKENS, description="every length is this")

    @property
    def bounds(self) -> tuple[int, int]:
        return self.tokens, self.tokens


class _Ordered(Block):
    """Has a `min_…` and a `max_…`."""

    @model_validator(mode="after")
    def _ordered(self):
        low, high = (next(name for name in type(self).model_fields if name.startswith(end)) for end in ("min_", "max_"))
        if getattr(self, low) > getattr(self, high):
            raise ValueError(f"{low} {getattr(self, low):.10g} is above {high} {getattr(self, high):.10g}; swap them")
        return self


class _Clipped(_Ordered):
    min_tokens: Whole = Field(ge=1, le=MOST_TOKENS, description="at most `max_tokens`")
    max_tokens: Whole = Field(ge=1, le=MOST_TOKENS, description="included")

    @property
    def bounds(self) -> tuple[int, int]:
        return self.min_tokens, self.max_tokens


class Uniform(_Clipped):
    """Every whole number between the bounds, both included, equally often."""

    distribution: Literal["uniform"]


class Around(Block):
    """Every whole number from `tokens` less `ratio` of it to `tokens` and `ratio` more, equally often: what
    `--random-input-len` and `--random-range-ratio` of `vllm bench serve` draw."""

    distribution: Literal["around"]
    tokens: Whole = Field(ge=1, le=5_000_000, description="the middle")
    ratio: Number = Field(ge=0, lt=1, description="0.3 is 70 to 130 around 100")

    @property
    def bounds(self) -> tuple[int, int]:
        return max(1, math.floor(self.tokens * (1 - self.ratio))), math.ceil(self.tokens * (1 + self.ratio))


class Normal(_Clipped):
    """The bell curve, rounded and clipped to the bounds: much of it beyond them shifts its mean."""

    distribution: Literal["normal"]
    mean_tokens: Number = Field(gt=0, le=MOST_TOKENS, description="before clipping")
    stddev_tokens: Number = Field(gt=0, le=MOST_TOKENS, description="before clipping")


class Zipf(_Clipped):
    """Few are long: the k-th length from `min_tokens` up comes with a probability proportional to 1/k^exponent."""

    distribution: Literal["zipf"]
    exponent: Number = Field(gt=0, le=10, description="at most 1,000,000 different lengths")

    @model_validator(mode="after")
    def _table_fits(self):
        if self.max_tokens - self.min_tokens >= MAX_ZIPF_LENGTHS:
            raise ValueError(
                f"has {self.max_tokens - self.min_tokens + 1} different lengths; at most {MAX_ZIPF_LENGTHS:,} fit its "
                "table: lower max_tokens"
            )
        return self


class Empirical(_Clipped):
    """Lengths as they were measured: of a histogram given here, or of a file (a trace of any known form)."""

    distribution: Literal["empirical"]
    histogram: dict[Tokens, Weight] | None = Field(None, min_length=1, description="`{100: 3, 400: 1}`")
    file: str | None = Field(None, min_length=1, description="a trace, whose prompts (or outputs) are measured")

    @model_validator(mode="after")
    def _one_source(self):
        if (self.histogram is None) == (self.file is None):
            raise ValueError("needs histogram or file, one of the two")
        if self.histogram is not None and not any(self.histogram.values()):
            raise ValueError("has a histogram whose weights are all 0; give one above 0")
        return self


class Lognormal(_Clipped):
    """Half of the lengths below `median_tokens`; `sigma` is the standard deviation of their logarithm."""

    distribution: Literal["lognormal"]
    median_tokens: Number = Field(gt=0, description="half of the lengths are below, before clipping")
    sigma: Number = Field(gt=0, le=5, description="standard deviation of the logarithm of the length")


class FromTrace(_Clipped):
    """The row's own length times `scale`, clipped to the bounds: of the trace that arrives, or of `from_file`."""

    distribution: Literal["trace"]
    scale: Number = Field(1.0, gt=0, le=1_000, description="times the length in the trace")


Length = Annotated[
    Fixed | Uniform | Around | Normal | Lognormal | Zipf | Empirical | FromTrace,
    Field(discriminator="distribution"),
    _number_is_fixed("tokens"),
]


class FixedSeconds(Block):
    distribution: Literal["fixed"]
    seconds: Number = Field(ge=0, le=MOST_SECONDS, description="every time is this")


class UniformSeconds(_Ordered):
    distribution: Literal["uniform"]
    min_s: Number = Field(ge=0, le=MOST_SECONDS, description="at most `max_s`")
    max_s: Number = Field(ge=0, le=MOST_SECONDS, description="included")


class ExponentialSeconds(Block):
    """Memoryless. `at_most_s` cuts what is longer."""

    distribution: Literal["exponential"]
    mean_s: Number = Field(gt=0, le=MOST_SECONDS, description="before `at_most_s` cuts")
    at_most_s: Number = Field(MOST_SECONDS, gt=0, le=MOST_SECONDS, description="cuts what is longer")


class LognormalSeconds(Block):
    """Half of the times below `median_s`; `sigma` is the standard deviation of their logarithm."""

    distribution: Literal["lognormal"]
    median_s: Number = Field(gt=0, le=MOST_SECONDS, description="half of the times are below")
    sigma: Number = Field(gt=0, le=5, description="standard deviation of the logarithm")
    at_most_s: Number = Field(MOST_SECONDS, gt=0, le=MOST_SECONDS, description="cuts what is longer")


class FixedTurns(Block):
    distribution: Literal["fixed"]
    turns: Whole = Field(ge=1, le=MOST_TURNS, description="every session has this many")


class UniformTurns(_Ordered):
    """Every whole number between the bounds, both included, equally often."""

    distribution: Literal["uniform"]
    min_turns: Whole = Field(ge=1, le=MOST_TURNS, description="at most `max_turns`")
    max_turns: Whole = Field(ge=1, le=MOST_TURNS, description="included")


class GeometricTurns(Block):
    """After every turn the session ends with the same chance: `mean_turns` on average, before `max_turns` cuts."""

    distribution: Literal["geometric"]
    mean_turns: Number = Field(ge=1, le=MOST_TURNS, description="before `max_turns` cuts")
    max_turns: Whole = Field(ge=1, le=MOST_TURNS, description="included")


Seconds = Annotated[
    FixedSeconds | UniformSeconds | ExponentialSeconds | LognormalSeconds,
    Field(discriminator="distribution"),
    _number_is_fixed("seconds"),
]
Turns = Annotated[
    FixedTurns | UniformTurns | GeometricTurns, Field(discriminator="distribution"), _number_is_fixed("turns")
]
