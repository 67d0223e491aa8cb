"""Pauses of people and tools, their patience, and how often they come back: distributions in a scenario file."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from loadgen.scenario.block import Block, Number, Whole

MOST_SECONDS = 86_400
MOST_TURNS = 1_000


class FixedSeconds(Block):
    distribution: Literal["fixed"]
    seconds: Number = Field(ge=0, le=MOST_SECONDS)


class UniformSeconds(Block):
    distribution: Literal["uniform"]
    min_s: Number = Field(ge=0, le=MOST_SECONDS)
    max_s: Number = Field(ge=0, le=MOST_SECONDS)

    @model_validator(mode="after")
    def _ordered(self):
        if self.min_s > self.max_s:
            raise ValueError(f"min_s {self.min_s:g} is above max_s {self.max_s:g}; swap them")
        return self


class ExponentialSeconds(Block):
    """Memoryless. `at_most_s` cuts what is longer."""

    distribution: Literal["exponential"]
    mean_s: Number = Field(gt=0, le=MOST_SECONDS)
    at_most_s: Number = Field(MOST_SECONDS, gt=0, le=MOST_SECONDS)


class LognormalSeconds(Block):
    """Half of the times below `median_s`; `sigma` is the standard deviation of their logarithm."""

    distribution: Literal["lognormal"]
    median_s: Number = Field(gt=0, le=MOST_SECONDS)
    sigma: Number = Field(gt=0, le=5)
    at_most_s: Number = Field(MOST_SECONDS, gt=0, le=MOST_SECONDS)


class FixedTurns(Block):
    distribution: Literal["fixed"]
    turns: Whole = Field(ge=1, le=MOST_TURNS)


class UniformTurns(Block):
    """Every whole number between the bounds, both included, equally often."""

    distribution: Literal["uniform"]
    min_turns: Whole = Field(ge=1, le=MOST_TURNS)
    max_turns: Whole = Field(ge=1, le=MOST_TURNS)

    @model_validator(mode="after")
    def _ordered(self):
        if self.min_turns > self.max_turns:
            raise ValueError(f"min_turns {self.min_turns} is above max_turns {self.max_turns}; swap them")
        return self


class GeometricTurns(Block):
    """After every turn the session ends with the same chance: `mean_turns` on average, before `max_turns` cuts."""

    distribution: Literal["geometric"]
    mean_turns: Number = Field(ge=1, le=MOST_TURNS)
    max_turns: Whole = Field(ge=1, le=MOST_TURNS)


def _fixed(key: str):
    def number_means_fixed(value: Any) -> Any:
        return {"distribution": "fixed", key: value} if isinstance(value, bool | int | float) else value

    return BeforeValidator(number_means_fixed)


Seconds = Annotated[
    Annotated[
        FixedSeconds | UniformSeconds | ExponentialSeconds | LognormalSeconds, Field(discriminator="distribution")
    ],
    _fixed("seconds"),
]
Turns = Annotated[
    Annotated[FixedTurns | UniformTurns | GeometricTurns, Field(discriminator="distribution")], _fixed("turns")
]
