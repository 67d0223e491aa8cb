"""How wrong each maker of estimates was on public measurements, by cell: the file that `bench.silicon` writes.

A cell is a model, device, backend and weight format. Where nobody measured that one, a wider cell speaks: the same
device, backend and format of any model, then the device and backend, then all.
"""

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import ClassVar, Literal

import msgspec

from sojourn.metrics.compute.model_catalog import known_name, title_of
from sojourn.replay.device.estimate import Deployment, KnownError

Maker = Literal["kernels", "roofline"]
FILE = Path(__file__).with_name("known_errors.json")
ANY = "any"
MOST_NAMED = 3  # degrees, less one


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of TPOT. `low` and `high` bound 80 % of measured / estimated."""

    model: str
    device: str
    backend: str
    weight_format: str
    measurements: int
    median: float
    p90: float
    bias: float
    low: float
    high: float
    degrees: tuple[int, ...] = ()  # of tensor parallelism that its measurements have; (): an older bench did not say

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.model, self.device, self.backend, self.weight_format

    @property
    def title(self) -> str:
        parts = ["any model" if part == ANY else part for part in dict.fromkeys(self.key)]
        return ", ".join([*parts, _devices(self.degrees)] if self.degrees else parts)


class RatioCell(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of the ratio of TPOT between two deployments that differ in one thing, `kind`: a field of Deployment.
    `low` and `high` bound 80 % of the measured over the estimated ratio."""

    KEY: ClassVar[tuple[str, ...]] = ("kind", "first", "second", "backend")
    kind: str
    first: str
    second: str
    backend: str
    measurements: int
    median: float
    p90: float
    low: float
    high: float

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.kind, self.first, self.second, self.backend


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """What the bench found of one maker."""

    cells: list[Cell]
    ratios: list[RatioCell]
    corrected: list[Cell] = []  # of the other loads of a deployment, where one was measured


def kinds_of_ratio() -> tuple[tuple[str, ...], ...]:
    """Which fields of a RatioCell say something, from the nearest cell to the widest."""
    return (RatioCell.KEY, ("kind", "first", "second"), ("kind", "second"), ("kind",))


def keys_of(deployment: Deployment) -> list[tuple[str, str, str, str]]:
    """The cells that speak for a deployment, the nearest first."""
    d = deployment
    title = title_of(d.model)
    model = known_name(title) or title
    return [
        (model, d.device, d.backend, d.weight_format), (ANY, d.device, d.backend, d.weight_format),
        (ANY, d.device, d.backend, ANY), (ANY, ANY, d.backend, ANY), (ANY, ANY, ANY, ANY),
    ]  # fmt: skip


def known_error(deployment: Deployment, maker: Maker, *, is_corrected: bool = False) -> KnownError | None:
    """Of the nearest cell; None where no file is there, or no cell speaks. `is_corrected`: by one measured point."""
    found = _judged(maker).corrected if is_corrected else _judged(maker).cells
    cells = {each.key: each for each in found}
    cell = next((cells[key] for key in keys_of(deployment) if key in cells), None)
    if cell is None:
        return None
    title = cell.title + (", corrected by one measured point" if is_corrected else "")
    return KnownError(
        cell=title, measurements=cell.measurements, median=cell.median, p90=cell.p90, bias=cell.bias,
        low=cell.low, high=cell.high, has_degree=not cell.degrees or deployment.tensor_parallel in cell.degrees,
    )  # fmt: skip


def _devices(degrees: Sequence[int]) -> str:
    """one device; 2, 4 or 8 devices; 1 to 72 devices"""
    if list(degrees) == [1]:
        return "one device"
    *first, last = map(str, degrees)
    if len(first) > MOST_NAMED:
        return f"{first[0]} to {last} devices"
    return (f"{', '.join(first)} or {last}" if first else last) + " devices"


def ratio_error(before: Deployment, after: Deployment, maker: Maker) -> KnownError | None:
    """Of the ratio between two deployments. Of several differences the errors add as independent ones, around the sum
    of their centres. Where nobody judged one of them, the error of the new deployment's own times; None where nothing
    differs, or nothing speaks."""
    ratios, found = _ratios(maker), []
    for kind in ("device", "tensor_parallel", "weight_format"):
        first, second = str(getattr(before, kind)), str(getattr(after, kind))
        if first == second:
            continue
        said = {"kind": kind, "first": first, "second": second, "backend": after.backend}
        keys = [tuple(said[name] if name in names else ANY for name in RatioCell.KEY) for names in kinds_of_ratio()]
        cell = next((ratios[key] for key in keys if key in ratios), None)
        if cell is None:
            return known_error(after, maker)
        found.append(cell)
    if not found:
        return None
    median, p90 = (math.hypot(*(getattr(cell, name) for cell in found)) for name in ("median", "p90"))
    logs = [(math.log(cell.low), math.log(cell.high)) for cell in found]
    centre = sum(low + high for low, high in logs) / 2  # both bounds of a biased cell lie on one side of 1
    half = math.hypot(*((high - low) / 2 for low, high in logs))
    return KnownError(
        cell="; ".join(_ratio_title(cell) for cell in found), measurements=min(cell.measurements for cell in found),
        median=median, p90=p90, bias=0.0, low=math.exp(centre - half), high=math.exp(centre + half),
    )  # fmt: skip


def _ratio_title(cell: RatioCell) -> str:
    backend = "" if cell.backend == ANY else f" with {cell.backend}"
    return f"{cell.kind.replace('_', ' ')} {cell.first} to {cell.second}{backend}"


def write_judged(found: dict[Maker, Judged], path: Path = FILE) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    _judged.cache_clear()


@cache
def _judged(maker: Maker) -> Judged:
    if not FILE.exists():
        return Judged(cells=[], ratios=[])
    found = msgspec.json.decode(FILE.read_bytes(), type=dict[str, Judged])
    return found.get(maker, Judged(cells=[], ratios=[]))


def _ratios(maker: Maker) -> dict[tuple[str, ...], RatioCell]:
    return {cell.key: cell for cell in _judged(maker).ratios}
