"""What the `workload` block of a scenario file may say: classes of requests, their lengths and what they share."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from loadgen.scenario_block import Block, Number, Whole


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


class Lognormal(_Clipped):
    """Half of the lengths below `median_tokens`; `sigma` is the standard deviation of their logarithm."""

    distribution: Literal["lognormal"]
    median_tokens: Number = Field(gt=0)
    sigma: Number = Field(gt=0, le=5)


class FromTrace(_Clipped):
    """The trace's own length times `scale`, clipped to the bounds. Only with arrivals.process: trace."""

    distribution: Literal["trace"]
    scale: Number = Field(1.0, gt=0, le=1_000)


def _number_means_fixed(value: Any) -> Any:
    return {"distribution": "fixed", "tokens": value} if isinstance(value, bool | int | float) else value


Length = Annotated[
    Annotated[Fixed | Uniform | Lognormal | FromTrace, Field(discriminator="distribution")],
    BeforeValidator(_number_means_fixed),
]


class RequestClass(Block):
    """One kind of request. `prompt_tokens` counts the shared prefix too, but not what a chat template adds."""

    klass: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")
    tenant: str = Field("", max_length=64, pattern=r"^[A-Za-z0-9_.-]*$")
    priority: Whole = Field(0, ge=-1_000_000, le=1_000_000, description="lower goes first, where the policy asks")
    weight: Number = Field(1.0, gt=0, le=1_000_000)
    prompt_tokens: Length
    output_tokens: Length
    shared_prefix_tokens: Whole = Field(0, ge=0, le=10_000_000)
    num_shared_prefixes: Whole = Field(1, ge=1, le=1_000_000)
    temperature: Number = Field(0.0, ge=0, le=2)
    top_k: Whole | None = Field(None, ge=1)
    top_p: Number | None = Field(None, gt=0, le=1)
    ignore_eos: bool = Field(False, description="generate all of output_tokens even if the model would stop")

    @model_validator(mode="after")
    def _prefix_fits(self):
        shortest = self.prompt_tokens.bounds[0]
        if self.shared_prefix_tokens >= shortest:
            raise ValueError(
                f"shared_prefix_tokens {self.shared_prefix_tokens} must be below the shortest prompt, {shortest} "
                "tokens; shorten the prefix, or raise the lower bound of prompt_tokens"
            )
        return self


class Workload(Block):
    """What the requests ask for. `one_class` draws a class by weight; `every_class` sends one of each together."""

    each_arrival: Literal["one_class", "every_class"] = "one_class"
    classes: list[RequestClass] = Field(min_length=1)
