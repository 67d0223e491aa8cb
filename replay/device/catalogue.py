"""The devices that a server may be sized for: what their makers state, what an hour of one costs, and who says so."""

import difflib
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from sojourn.metrics.errors import InputError

FILE = Path(__file__).with_name("devices.toml")


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device. Rates are peaks."""

    title: str
    memory_gib: float
    bandwidth_gbs: float
    link_gbs: float  # to the other devices of its node, one direction
    flops: dict[str, float]  # format → dense TFLOP/s
    devices_per_node: int = 8
    watts: float | None = None
    source: str  # of all the above
    usd_per_hour: float | None = None
    price_source: str | None = None
    recorded_as: tuple[str, ...] = ()  # parts of the name that a driver gives it

    def flops_of(self, weight_format: str) -> float:
        """FLOP/s of a matrix product of such weights: the fastest that the device has for them. Without products of
        the format itself, weights are widened."""
        order = COMPUTED_IN[weight_format]
        return 1e12 * next(self.flops[name] for name in order if name in self.flops)


SPEEDS = ("memory_gib", "bandwidth_gbs", "link_gbs", "flops")  # of a device, of which its measured kernels depend
# Formats in which products of such weights may be computed, the narrowest first.
COMPUTED_IN = {
    "fp32": ("fp32", "bf16"), "bf16": ("bf16",), "fp16": ("bf16",), "fp8": ("fp8", "bf16"),
    "fp8_block": ("fp8", "bf16"),
    "int8": ("int8", "bf16"), "int4": ("bf16",), "mxfp4": ("bf16",), "nvfp4": ("fp4", "bf16"),
}  # fmt: skip


def catalogue(replacement: Path | None = None) -> dict[str, Device]:
    """All devices by name. `replacement` is a user's file: a figure of a known device takes the place of that here, an
    unknown device is added. Raises InputError."""
    if replacement is None:
        return dict(_bundled())
    entries = _entries(FILE.read_text())
    try:
        own = _entries(replacement.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{replacement}, the file of devices, cannot be read: {error}") from None
    for name, figures in own.items():
        known = entries.get(name, {"source": str(replacement)})
        if "usd_per_hour" in figures and "price_source" not in figures:
            figures = {**figures, "price_source": str(replacement)}
        entries[name] = {**known, **figures}
    return _devices(entries, str(replacement))


def device_named(name: str, devices: Mapping[str, Device] | None = None) -> Device:
    """Raises InputError, which names those that are known."""
    devices = _bundled() if devices is None else devices
    if name not in devices:
        close = difflib.get_close_matches(name, devices, 1, cutoff=0.5)
        meant = f" Did you mean {close[0]}?" if close else ""
        raise InputError(f"{name!r} is no known device.{meant} Known are {', '.join(devices)}")
    return devices[name]


def replaced_figures(name: str, devices: Mapping[str, Device]) -> list[str]:
    """Which figures of a bundled device's speed and memory a user's file replaces: measured kernels have the bundled
    ones."""
    bundled = _bundled().get(name)
    return (
        [] if bundled is None else [each for each in SPEEDS if getattr(bundled, each) != getattr(devices[name], each)]
    )


def device_recorded_as(name: str, devices: Mapping[str, Device] | None = None) -> str | None:
    """The catalogue's name of a device that a driver calls `name`; None: it has none. The longest match wins."""
    devices = _bundled() if devices is None else devices
    found = [
        (len(part), known)
        for known, device in devices.items()
        for part in device.recorded_as
        if re.search(rf"(?<![\w]){re.escape(part)}(?![\w])", name, re.IGNORECASE)
    ]
    return max(found)[1] if found else None


@cache
def _bundled() -> dict[str, Device]:
    return _devices(_entries(FILE.read_text()), FILE.name)


def _entries(text: str) -> dict[str, dict[str, Any]]:
    entries = tomllib.loads(text)
    for name, figures in entries.items():
        if not isinstance(figures, dict):
            raise InputError(f"{name!r} of the file of devices is no device; write [{name}] and its figures below")
    return entries


def _devices(entries: Mapping[str, Mapping[str, Any]], file: str) -> dict[str, Device]:
    found = {}
    for name, figures in entries.items():
        try:
            device = msgspec.convert(dict(figures), Device)
        except msgspec.ValidationError as error:
            raise InputError(f"device {name!r} of {file}: {error}") from None
        numbers = (device.memory_gib, device.bandwidth_gbs, device.link_gbs, *device.flops.values())
        if min(numbers) <= 0 or "bf16" not in device.flops:
            raise InputError(f"device {name!r} of {file} needs figures above 0, and flops of bf16")
        found[name] = device
    return found
