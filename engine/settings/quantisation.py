"""The settings of how weights are held (docs/quantisation.md)."""

from typing import Literal

from pydantic import BaseModel, ValidationInfo, field_validator

from engine.settings.panels import COMPUTE


class QuantisationSettings(BaseModel):
    weights: Literal["auto", "float32", "float16", "int8", "int4", "fp8"] = COMPUTE(
        "auto",
        description="format of matrices; auto keeps the checkpoint's; float32 and float16 are of a CPU; int8, int4 and "
        "fp8 round a dense checkpoint as it loads, where the device has a kernel",
    )
    weights_reference: str | None = COMPUTE(
        None,
        description="at the start, measures the error of the weights: against `self`, the checkpoint's own values "
        "without a kernel's roundings, or against the folder of the unquantised model",
    )

    @field_validator("weights_reference")
    @classmethod
    def _has_weights(cls, reference: str | None, info: ValidationInfo) -> str | None:
        if reference is not None and info.data.get("load_format") == "dummy":
            raise ValueError("load_format=dummy has random weights, whose error says nothing; leave one of the two out")
        return reference
