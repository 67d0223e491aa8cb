"""A run as a row of InferenceX (`agg_*.json`, from its utils/process_result.py at 843c625): one setting at one
concurrency, times in seconds, throughput divided by the GPUs, and `intvty`, the tokens per second of one user.

A row is of a closed loop with so many requests in flight. What a run does not know (image, speculation, precision of
another server's weights) is left out or "none", as there.
"""

from collections.abc import Mapping
from typing import Any

from sojourn.metrics.errors import InputError
from sojourn.metrics.run.devices import num_devices
from sojourn.metrics.run.directory import engine_settings, section

SECONDS_OF_MS = 1e-3


def inferencex_row(
    result: Mapping[str, Any], meta: Mapping[str, Any], *, gpus: int | None = None, hardware: str | None = None
) -> dict[str, Any]:
    """`result`: the document of `vllm_result`. `gpus` and `hardware` replace what the run knows of them. Raises
    InputError where the run has no such row."""
    devices = gpus or num_devices(meta)
    if devices is None:
        raise InputError("the run does not know the number of GPUs of its server, by which a row divides; give --gpus")
    concurrency = result.get("max_concurrency")
    if not concurrency:
        raise InputError(
            "a row of InferenceX is of a closed loop with a number of requests in flight, and this run is an open "
            "load; send one with arrivals.process concurrency or users"
        )
    output, total = result.get("output_throughput"), result.get("total_token_throughput")
    if output is None or total is None or not result.get("completed"):
        raise InputError("the server reported no tokens, or answered nothing, so the run has no throughput")
    settings = engine_settings(dict(meta))
    completed = result["completed"]
    row: dict[str, Any] = {
        "hw": hardware or _hardware(meta), "conc": concurrency, "model": result.get("model_id"),
        "framework": "sojourn" if "max_num_seqs" in settings else result.get("backend"),
        "precision": settings.get("dtype") or "unknown",
        "spec_decoding": settings.get("speculation") or "none", "disagg": False, "is_multinode": False,
        "isl": round(result["total_input_tokens"] / completed), "osl": round(result["total_output_tokens"] / completed),
        "tp": int(settings.get("tensor_parallel") or devices), "pp": int(settings.get("pipeline_parallel") or 1),
        "ep": int(settings.get("expert_parallel") or 1), "dp_attention": "false",
        "tput_per_gpu": total / devices, "output_tput_per_gpu": output / devices,
        "input_tput_per_gpu": (total - output) / devices,
    }  # fmt: skip
    return row | _seconds(result)


def axes(result: Mapping[str, Any], meta: Mapping[str, Any]) -> dict[str, float]:
    """The two axes of published rows, for the document of `vllm_result`: output tokens per second of one GPU, where the
    run knows its GPUs, and of one user."""
    devices, output = num_devices(meta), result.get("output_throughput")
    per_gpu = {} if devices is None or output is None else {"output_tput_per_gpu": output / devices}
    return per_gpu | _per_user(result)


def _seconds(result: Mapping[str, Any]) -> dict[str, float]:
    """Latencies in seconds, and the tokens per second of one user."""
    return {key.removesuffix("_ms"): value * SECONDS_OF_MS for key, value in _latencies(result)} | _per_user(result)


def _per_user(result: Mapping[str, Any]) -> dict[str, float]:
    return {
        key.removesuffix("_ms").replace("tpot", "intvty"): 1000.0 / value
        for key, value in _latencies(result) if "_tpot_" in key and value > 0 and not key.startswith("std_")
    }  # fmt: skip


def _latencies(result: Mapping[str, Any]) -> list[tuple[str, float]]:
    return [
        (key, value) for key, value in result.items()
        if key.endswith("_ms") and isinstance(value, int | float) and "_due_" not in key
    ]  # fmt: skip


def _hardware(meta: Mapping[str, Any]) -> str:
    hardware = section(meta, "hardware")
    found = hardware.get("gpus") or hardware.get("cpu") or "unknown"
    return str(found[0] if isinstance(found, list) and found else found)
