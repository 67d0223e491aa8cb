"""What one device can do at most, measured once and stored, and how near to it a piece of work came.

The roofline model (Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009): work of F FLOPs that moves B bytes
takes at least max(F / peak rate, B / bandwidth). The ceilings are measured by `sojourn calibrate device`, never taken
from a data sheet. The engine measures; this file knows no torch.
"""

from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np
from rich import box
from rich.table import Table

from sojourn.metrics.compute.link import Link
from sojourn.metrics.errors import CalibrationError
from sojourn.metrics.machine.host import hardware
from sojourn.metrics.machine.store import store, store_path

if TYPE_CHECKING:
    import pandas as pd

Amount = TypeVar("Amount", float, np.ndarray, "pd.Series")


class Gemm(msgspec.Struct, frozen=True):
    """A matrix product [rows, inner] x [inner, columns] with weights that no cache holds."""

    precision: str
    rows: int
    flops_per_s: float


class Ceilings(msgspec.Struct, frozen=True):
    """The limits of one device, all measured."""

    device: str
    threads: int  # of the CPU while it was measured
    measured_at: str  # ISO 8601, UTC
    versions: dict[str, str]
    read_bytes_per_s: float  # of the fastest reader: a sum, or a matrix product with few rows
    copy_bytes_per_s: float  # bytes read plus bytes written
    inner: int  # size of the weights of every product: [inner, inner]
    gemm: list[Gemm]
    launch_ns: float | None = None  # CUDA: host time of launching one kernel
    links: list[Link] = []  # exchanges between two ranks; none of a CUDA machine with one device

    @property
    def bandwidth(self) -> float:
        """Bytes a second that memory gives at most."""
        return max(self.read_bytes_per_s, self.copy_bytes_per_s)

    @property
    def precisions(self) -> list[str]:
        return sorted({gemm.precision for gemm in self.gemm})

    def peak_flops(self, precision: str) -> float:
        """FLOPs a second of the fastest product in a precision. Raises CalibrationError if it was not measured."""
        rates = [gemm.flops_per_s for gemm in self.gemm if gemm.precision == precision]
        if not rates:
            raise CalibrationError(
                f"no matrix product in {precision} was measured on {self.device} (only {', '.join(self.precisions)}); "
                "run sojourn calibrate device again"
            )
        return max(rates)

    def ridge(self, precision: str) -> float:
        """FLOPs a byte above which arithmetic is the bound, below which memory is."""
        return self.peak_flops(precision) / self.bandwidth

    def roofline_ns(self, flops: Amount, moved_bytes: Amount, precision: str) -> Amount:
        """Nanoseconds that a piece of work takes at least, or each of many."""
        return 1e9 * np.maximum(flops / self.peak_flops(precision), moved_bytes / self.bandwidth)

    def copies_ns(self, copied_bytes: Amount) -> Amount:
        """Nanoseconds that copies within this memory take at least: each byte is read once and written once."""
        return 1e9 * 2 * copied_bytes / self.copy_bytes_per_s

    def mfu(self, flops: float, wall_ns: float, precision: str) -> float:
        """Model FLOPs utilisation: share of the measured peak rate. Says nothing of work that memory bounds."""
        return flops / self.peak_flops(precision) / (wall_ns / 1e9)

    def mbu(self, moved_bytes: float, wall_ns: float) -> float:
        """Model bandwidth utilisation: share of the measured bandwidth."""
        return moved_bytes / self.bandwidth / (wall_ns / 1e9)


def product_precision(weights: str, dtype: str, device: str) -> str:
    """The precision in which matrix products are computed. Weights of 16 bits on a CPU are multiplied in the dtype of
    the activations; those of 8 bits are not, and those of 4 bits are multiplied as int8 on a CPU alone."""
    narrow = weights == "int8" or (weights == "int4" and device == "cpu")
    return "int8" if narrow else dtype


def device_name(gpu: str | None = None) -> str:
    """How ceilings name the device that they were measured on: a GPU, or the CPU and the cores that one may use."""
    if gpu is not None:
        return gpu
    machine = hardware()
    return f"{machine['cpu']}, {machine['cores']} cores"


def ceilings_path(device: str) -> Path:
    """The file of a device's ceilings."""
    return store_path("device", device)


def store_ceilings(ceilings: Ceilings, path: Path | None = None) -> Path:
    """Writes them, all or nothing; by default where `load_ceilings` finds them."""
    return store(ceilings, path or ceilings_path(ceilings.device))


def load_ceilings(device: str | None = None, path: Path | None = None) -> Ceilings:
    """The stored ceilings of a device, or those of a file. Raises CalibrationError with the way out."""
    path = path or ceilings_path(device or device_name())
    try:
        return msgspec.json.decode(path.read_bytes(), type=Ceilings)
    except FileNotFoundError:
        raise CalibrationError(
            f"the ceilings of {device or path} have not been measured; run sojourn calibrate device"
        ) from None
    except (OSError, msgspec.DecodeError) as error:
        raise CalibrationError(
            f"{path} cannot be read as ceilings: {error}; run sojourn calibrate device again"
        ) from None


def ceilings_table(ceilings: Ceilings) -> Table:
    """For a terminal: one line a precision, with its rates by rows and its ridge point."""
    rows = list(dict.fromkeys(gemm.rows for gemm in ceilings.gemm))
    bandwidth = f"read {ceilings.read_bytes_per_s / 1e9:,.1f} GB/s, copy {ceilings.copy_bytes_per_s / 1e9:,.1f} GB/s"
    launch = f", launch {ceilings.launch_ns / 1e3:.1f} µs" if ceilings.launch_ns else ""
    ridge = "ridge: FLOPs per byte from which on arithmetic binds, no longer bandwidth"
    table = Table(
        title=f"{ceilings.device}: {bandwidth}{launch}", caption=ridge, box=box.SIMPLE, title_justify="left",
        caption_justify="left",
    )  # fmt: skip
    for head in ("GFLOP/s at rows", *map(str, rows), "ridge FLOP/byte"):
        table.add_column(head, justify="right")
    for precision in ceilings.precisions:
        rates = {gemm.rows: gemm.flops_per_s / 1e9 for gemm in ceilings.gemm if gemm.precision == precision}
        table.add_row(precision, *(f"{rates[count]:,.0f}" for count in rows), f"{ceilings.ridge(precision):,.1f}")
    return table


def links_table(links: list[Link]) -> Table:
    """For a terminal: one line a kind of exchange, with its times by size and what was fitted to them."""
    sizes = [time.bytes for time in links[0].times]
    wait = f"behind unequal work a rank waits {links[0].wait_share:.1%} of it for the slower one"
    table = Table(
        title=f"{links[0].ranks} ranks over {links[0].transport}: µs of an exchange by KiB; a line fitted to them",
        caption=wait, box=box.SIMPLE, title_justify="left", caption_justify="left",
    )  # fmt: skip
    for head in ("KiB", *(f"{size / 1024:,.0f}" for size in sizes), "latency", "GB/s"):
        table.add_column(head, justify="right", no_wrap=True)
    for link in links:
        times = [f"{time.ns / 1e3:,.0f}" for time in link.times]
        table.add_row(link.collective, *times, f"{link.latency_ns / 1e3:,.0f}", f"{link.bytes_per_s / 1e9:,.2f}")
    return table
