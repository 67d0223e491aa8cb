"""What a scenario file may say of a length in tokens: a number, or one of eight distributions."""

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from loadgen.scenario.block import Block, Number, Whole

MAX_ZIPF_LENGTHS = 1_000_000
Tokens = Annotated[Whole, Field(ge=1, le=10_000_000)]
Weight = Annotated[Number, Field(ge=0)]


class Fixed(Block):
    distribution: Literal["fixed"]
    tokens: Whole = Field(ge=1, le=10_000_000)

    @property
    def bounds(self) -> tuple[int, int]:
        return self.tokens, self.tokens


class _Clipped(Block):
    min_tokens: Whole = Field(ge=1, le=10_000_000)
    max_tokens: Whole = Field(ge=1, le=10_000_000)

    @model_validator(mode="after")
    def _ordered(self):
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}; swap them")
        return self

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
    tokens: Whole = Field(ge=1, le=5_000_000)
    ratio: Number = Field(ge=0, lt=1)

    @property
    def bounds(self) -> tuple[int, int]:
        return max(1, math.floor(self.tokens * (1 - self.ratio))), math.ceil(self.tokens * (1 + self.ratio))


class Normal(_Clipped):
    """The bell curve, rounded and clipped to the bounds: much of it beyond them shifts its mean."""

    distribution: Literal["normal"]
    mean_tokens: Number = Field(gt=0, le=10_000_000)
    stddev_tokens: Number = Field(gt=0, le=10_000_000)


class Zipf(_Clipped):
    """Few are long: the k-th length from `min_tokens` up comes with a probability proportional to 1/k^exponent."""

    distribution: Literal["zipf"]
    exponent: Number = Field(gt=0, le=10)

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
    histogram: dict[Tokens, Weight] | None = Field(None, min_length=1, description="tokens → weight")
    file: str | None = Field(None, min_length=1, description="a trace: its prompts' or its outputs' lengths")

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
    median_tokens: Number = Field(gt=0)
    sigma: Number = Field(gt=0, le=5)


class FromTrace(_Clipped):
    """The row's own length times `scale`, clipped to the bounds: of the trace that arrives, or of `from_file`."""

    distribution: Literal["trace"]
    scale: Number = Field(1.0, gt=0, le=1_000)


def _number_means_fixed(value: Any) -> Any:
    return {"distribution": "fixed", "tokens": value} if isinstance(value, bool | int | float) else value


Length = Annotated[
    Annotated[
        Fixed | Uniform | Around | Normal | Lognormal | Zipf | Empirical | FromTrace,
        Field(discriminator="distribution"),
    ],
    BeforeValidator(_number_means_fixed),
]
