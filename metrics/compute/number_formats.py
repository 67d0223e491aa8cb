"""Formats of weights, and of keys and values: how many bits one number takes, its scales included."""

from typing import NamedTuple

from sojourn.metrics.errors import InputError


class NumberFormat(NamedTuple):
    """`bits` of a number, without its scales; a group of `group` numbers shares `scale_bits`."""

    name: str
    bits: int
    scale_bits: int = 0
    group: int = 1

    @property
    def bytes_each(self) -> float:
        return (self.bits + self.scale_bits / self.group) / 8

    def bytes_of(self, numbers: float) -> int:
        return round(numbers * self.bytes_each)


# Scales of a whole row or matrix are left out: they are below 0.1 %.
FORMATS = {each.name: each for each in (
    NumberFormat("fp32", 32), NumberFormat("bf16", 16), NumberFormat("fp16", 16),
    NumberFormat("fp8", 8),
    NumberFormat("fp8_block", 8, 32, 128 * 128),  # a float32 for each square, as DeepSeek-V3 has it
    NumberFormat("int8", 8),
    NumberFormat("int4", 4, 16 + 4, 128),  # a float16 and a zero point for each group, as AWQ and GPTQ have it
    NumberFormat("mxfp4", 4, 8, 32),  # OCP Microscaling Formats 1.0
    NumberFormat("nvfp4", 4, 8, 16),
)}  # fmt: skip
ALIASES = {
    "awq": "int4", "gptq": "int4", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32",
    "float": "fp32", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8", "fp4": "nvfp4",
    "w8a8": "int8", "w4a16": "int4",
}  # fmt: skip
KV_FORMATS = ("bf16", "fp16", "fp8", "int8", "fp32")


def weight_format(name: str) -> NumberFormat:
    """Raises InputError, which names those that are known."""
    return _known(name, "weights", tuple(FORMATS))


def kv_format(name: str) -> NumberFormat:
    """Raises InputError, which names those that are known."""
    return _known(name, "keys and values", KV_FORMATS)


def _known(name: str, of: str, names: tuple[str, ...]) -> NumberFormat:
    text = name.strip().lower()
    text = ALIASES.get(text, text)
    if text not in names:
        others = ", ".join(alias for alias, meant in ALIASES.items() if meant in names)
        raise InputError(f"{name!r} is no known format of {of}; known are {', '.join(names)}, and as names {others}")
    return FORMATS[text]
