"""Which format reads which `quantization_config`."""

from collections.abc import Callable
from typing import Any

from sojourn.engine.token.models.settings import section
from sojourn.engine.token.quantised.awq import awq
from sojourn.engine.token.quantised.compressed_tensors import compressed_tensors
from sojourn.engine.token.quantised.fp4 import modelopt_nvfp4, mxfp4
from sojourn.engine.token.quantised.fp8 import fp8
from sojourn.engine.token.quantised.gptq import gptq
from sojourn.engine.token.quantised.scheme import WeightScheme
from sojourn.engine.token.quantised.settings import word

SCHEMES: dict[str, Callable[[dict[str, Any]], WeightScheme]] = {
    "compressed-tensors": compressed_tensors,
    "awq": awq,
    "gptq": gptq,
    "fp8": fp8,
    "mxfp4": mxfp4,
}
MODELOPT = {"FP8": fp8, "NVFP4": modelopt_nvfp4}  # by quant_algo


def weight_scheme(config: dict[str, Any]) -> WeightScheme | None:
    """The format of config.json's `quantization_config`; None where there is none. Raises ModelError."""
    settings = section(config, "quantization_config") or section(config, "compression_config")
    if not settings:
        return None
    method = settings.get("quant_method")
    if method == "modelopt" or (method is None and "quant_algo" in settings):
        return MODELOPT[word(settings, "quant_algo", MODELOPT)](settings)
    return SCHEMES[word(settings, "quant_method", (*SCHEMES, "modelopt"))](settings)
