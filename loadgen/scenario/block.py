"""What every block of a scenario file is made of."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict


def _no_truth_value(value: Any) -> Any:
    if isinstance(value, bool):  # to Python, true is the number 1
        raise ValueError(f"is {str(value).lower()}; it must be a number, not true or false")
    return value


Whole = Annotated[int, BeforeValidator(_no_truth_value)]
Number = Annotated[float, BeforeValidator(_no_truth_value)]


class Block(BaseModel):
    """Frozen; refuses keys that it does not know, and numbers that are not finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
