"""Formats of weights and KV that compute the same steps faster on this machine."""

from sojourn.diagnosis.evidence import Client, Records
from sojourn.metrics.compute.speed_facts import OtherSettings

# The more bits, the nearer to what the checkpoint stores. The error of fp8 is above that of int8
# (docs/kv_cache.md, docs/quantisation.md).
PRECISION = {"int4": 4, "fp8": 7, "int8": 8, "float16": 16, "bfloat16": 16, "float32": 32, "auto": 32}
FASTER = 1.15  # below it two calibrations of one setting may differ as much
MEASURED = "run.json: speed_reference"


def own_format(facts: Client, name: str) -> str:
    held = facts.engine.get(name) if name == "kv_cache_dtype" else (facts.meta.get("core") or {}).get(name)
    return str(held or "")


def faster_formats(facts: Records, name: str) -> list[OtherSettings]:
    """Other formats of `name` that are faster, the fastest first."""
    speed = facts.speed()
    return [] if speed is None else [each for each in speed.formats if name in each.settings and each.speedup >= FASTER]
