"""What an exchange between ranks takes: measured by `sojourn calibrate device`, and fitted as latency plus bytes.

The cost of a message is α + bytes / β (Hockney, "The communication challenge for MPP", Parallel Computing 20, 1994).
Ranks are not done with their work at the same moment. So an exchange behind work also waits, for a share of that work.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from sojourn.metrics.compute.cost_model import Count
from sojourn.metrics.statistics.non_negative import non_negative

POINT_TO_POINT = "send"  # as one way takes: half of there and back
LINK_COLLECTIVES = ("all_reduce", "all_gather", "all_to_all", POINT_TO_POINT)


class LinkTime(msgspec.Struct, frozen=True):
    """One measured size."""

    bytes: int  # of the whole tensor, as CollectiveCount counts them
    ns: float


class Link(msgspec.Struct, frozen=True):
    """One kind of exchange between so many ranks of one host."""

    collective: str  # of LINK_COLLECTIVES
    transport: str  # gloo, nccl
    ranks: int
    latency_ns: float
    bytes_per_s: float
    wait_share: float  # of the work since the exchange before: how long a rank waits for the slower one
    times: list[LinkTime]

    def exchange_ns(self, calls: Count, num_bytes: Count) -> np.ndarray | float:
        """Nanoseconds of so many exchanges with so many bytes together, of ranks that come at the same moment."""
        return self.latency_ns * calls + 1e9 * num_bytes / self.bytes_per_s

    @property
    def fit_error(self) -> float:
        """The largest relative error of the fitted line at a measured size."""
        return max(abs(float(self.exchange_ns(1, time.bytes)) / time.ns - 1) for time in self.times)


def fitted_link(
    collective: str, transport: str, ranks: int, times: list[LinkTime], waits: Sequence[tuple[float, float]] = ()
) -> Link:
    """Least squares of the relative errors. `waits`: work before an exchange, and how much longer that took, in ns.

    A smaller message never takes longer than a larger one: where it did, something else ran meanwhile.
    """
    ns = np.minimum.accumulate([time.ns for time in reversed(times)])[::-1]
    times = [LinkTime(time.bytes, float(least)) for time, least in zip(times, ns, strict=True)]
    rows = np.array([(1.0, time.bytes) for time in times]) / ns[:, None]
    found, _ = non_negative(rows.T @ rows, rows.sum(axis=0), np.array([True, True]), ridge=1e-9)
    work = sum(before for before, _ in waits)
    return Link(
        collective=collective,
        transport=transport,
        ranks=ranks,
        latency_ns=float(found[0]),
        bytes_per_s=1e9 / max(float(found[1]), 1e-6),  # 1e-6: a link that no size slows down
        wait_share=max(0.0, sum(longer for _, longer in waits) / work) if work else 0.0,
        times=times,
    )
