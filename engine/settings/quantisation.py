"""The settings of how weights are held (docs/quantisation.md)."""

from typing import Literal

from pydantic import BaseModel, ValidationInfo, field_validator

from sojourn.engine.settings.panels import COMPUTE


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

    @field_validator("load_format", check_fields=False)  # of EngineConfig, whose fields are checked after these
    @classmethod
    def _has_weights(cls, load_format: str, info: ValidationInfo) -> str:
        if load_format == "dummy" and info.data.get("weights_reference") is not None:
            raise ValueError("random weights have no error; leave weights_reference out")
        return load_format
