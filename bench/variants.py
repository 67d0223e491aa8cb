"""Settings that are compared within one run: variants that the user names, and the off-switch of each optimisation."""

from typing import Any

from bench.results import BenchError
from sojourn.engine.config import EngineConfig
from sojourn.engine.options import assignments, engine_config

BASE = "sojourn"

# Setting → the value that switches it off, and the devices on which it does something.
OFF_SWITCHES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "overlap": ("off", ("cuda",)),
    "graphs": ("off", ("cuda",)),
    "attention_backend": ("torch", ("cuda", "cpu")),
    "fused_operations": ("off", ("cuda", "cpu")),
    "weights": ("float32", ("cpu",)),
}


def named_variants(texts: list[str]) -> dict[str, dict[str, Any]]:
    """NAME:KEY=VALUE,KEY=VALUE → settings by name."""
    variants = {}
    for text in texts:
        name, colon, pairs = text.partition(":")
        if not colon or not name.strip():
            raise BenchError(f"--variant {text!r} is not NAME:KEY=VALUE[,KEY=VALUE], such as int8:weights=int8")
        if name.strip() in (BASE, *variants):
            raise BenchError(f"--variant {name.strip()} is there already; give each a name of its own, not {BASE}")
        variants[name.strip()] = assignments(pairs.split(","), "--variant")
    return variants


def ablations(settings: dict[str, Any], device: str) -> dict[str, dict[str, Any]]:
    """One variant for each optimisation that this device and these settings have: everything but that one. Graphs hold
    no reference kernels: on CUDA, who goes without attention's or the fused operations goes without graphs, too."""
    kind = "cpu" if device == "cpu" else "cuda"
    variants = {}
    for name, (off, devices) in OFF_SWITCHES.items():
        if name not in EngineConfig.model_fields or kind not in devices:
            continue
        if settings.get(name) != off:
            variants[f"{name}={off}"] = settings | {name: off}
    return variants


def check_settings(model: str, settings: dict[str, Any]) -> None:
    """Raises InputError for a setting that the engine refuses, before anything starts."""
    engine_config({"model": model} | settings)
