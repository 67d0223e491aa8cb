"""How wrong each maker of estimates was on public measurements, by cell: the file that `bench.silicon` writes.

A cell is a model, device, backend and weight format. Where nobody measured that one, a wider cell speaks: the same
device, backend and format of any model, then the device and backend, then all.
"""

from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from sojourn.metrics.compute.model_catalog import known_name
from sojourn.replay.device.estimate import Deployment, KnownError

Maker = Literal["kernels", "roofline"]
FILE = Path(__file__).with_name("known_errors.json")
ANY = "any"


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

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.model, self.device, self.backend, self.weight_format

    @property
    def title(self) -> str:
        return ", ".join("any model" if part == ANY else part for part in dict.fromkeys(self.key))


def keys_of(deployment: Deployment) -> list[tuple[str, str, str, str]]:
    """The cells that speak for a deployment, the nearest first."""
    d = deployment
    model = known_name(d.model) or d.model
    return [
        (model, d.device, d.backend, d.weight_format), (ANY, d.device, d.backend, d.weight_format),
        (ANY, d.device, d.backend, ANY), (ANY, ANY, d.backend, ANY), (ANY, ANY, ANY, ANY),
    ]  # fmt: skip


def known_error(deployment: Deployment, maker: Maker) -> KnownError | None:
    """Of the nearest cell; None where no file is there, or no cell speaks."""
    cells = _cells(maker)
    cell = next((cells[key] for key in keys_of(deployment) if key in cells), None)
    if cell is None:
        return None
    return KnownError(
        cell=cell.title, measurements=cell.measurements, median=cell.median, p90=cell.p90, bias=cell.bias,
        low=cell.low, high=cell.high,
    )  # fmt: skip


def write_cells(cells: dict[Maker, list[Cell]], path: Path = FILE) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(cells), indent=1) + b"\n")
    _cells.cache_clear()


@cache
def _cells(maker: Maker) -> dict[tuple[str, str, str, str], Cell]:
    if not FILE.exists():
        return {}
    read = msgspec.json.decode(FILE.read_bytes(), type=dict[str, list[Cell]])
    return {cell.key: cell for cell in read.get(maker, [])}
