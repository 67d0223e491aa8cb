"""How far two hosts' clocks are apart, from requests alone: causes come before their effects, whatever a clock says.

A request arrives after it was sent, and its answer is read after it was made. So each request bounds the offset from
both sides, as in NTP (Mills, RFC 5905, section 8), and the true offset lies within all the bounds at once. The clocks
of two hosts also run at slightly different rates, so the offset is a line in time. All lines that keep every bound form
a polygon; its middle is the estimate, and how far it reaches is the uncertainty. Nothing is averaged: an asymmetric way
does not bias a bound, it only makes it loose.
"""

import msgspec
import numpy as np

from sojourn.metrics.errors import RunDataError

MAX_DRIFT = 500e-6  # the most that NTP allows a clock to be off its rate (RFC 5905); a quartz is off by 1e-5
ROUNDING_NS = 1.0  # what stamps in whole nanoseconds may contradict each other by


class ClockOffset(msgspec.Struct, frozen=True, kw_only=True):
    """server clock - client clock = offset_ns + drift · (server clock - reference_ns)."""

    offset_ns: float
    drift: float  # ns per ns
    reference_ns: int
    uncertainty_ns: float  # at most, at any time between the first bound and the last
    bounds: int  # stamps that it rests on

    def at(self, server_ns: np.ndarray | int) -> np.ndarray | float:
        """The offset at a time of the server's clock, ns."""
        return self.offset_ns + self.drift * (server_ns - self.reference_ns)

    def to_client(self, server_ns: np.ndarray) -> np.ndarray:
        """Times of the server's clock on the client's: whole nanoseconds."""
        return server_ns - np.rint(self.at(server_ns)).astype("int64")


def estimate_offset(
    sent_ns: np.ndarray, arrived_ns: np.ndarray, answered_ns: np.ndarray, read_ns: np.ndarray
) -> ClockOffset:
    """The offset from pairs of stamps: sent by the client before it arrived at the server, and made by the server
    before it was read by the client. The two kinds of pairs need not be of the same requests. Raises RunDataError."""
    if not len(sent_ns) or not len(answered_ns):
        raise RunDataError("no request has stamps of both clocks, so nothing is known of their offset")
    times = np.concatenate([arrived_ns, answered_ns])
    reference = int((int(times.min()) + int(times.max())) // 2)
    span = max(float(times.max() - times.min()), 1.0)
    # In units of half the span, so that both coefficients are nanoseconds
    unit = span / 2
    base = int(np.median(arrived_ns - sent_ns))
    above = _hull((arrived_ns - reference) / unit, (arrived_ns - sent_ns - base).astype("float64") + ROUNDING_NS)
    below = _hull((answered_ns - reference) / unit, -((answered_ns - read_ns - base).astype("float64") - ROUNDING_NS))
    widest = float(np.abs(np.concatenate([above[:, 1], below[:, 1]])).max()) + MAX_DRIFT * unit + 1.0
    steepest = MAX_DRIFT * unit
    lines = [(-widest, -steepest), (widest, -steepest), (widest, steepest), (-widest, steepest)]
    for x, bound in above:  # a + b x <= bound
        lines = _clip(lines, 1.0, x, bound)
    for x, bound in below:  # -(a + b x) <= bound
        lines = _clip(lines, -1.0, -x, bound)
    if not lines:
        raise RunDataError(
            "the stamps contradict each other: no steady offset lets every request arrive after it was sent and be "
            "read after it was made; was a clock set during the run, or is the server run of another load?"
        )
    corners = np.array(lines)
    edges = np.stack([corners[:, 0] - corners[:, 1], corners[:, 0] + corners[:, 1]], axis=1)  # offsets at both ends
    middle = (edges.max(axis=0) + edges.min(axis=0)) / 2
    half = (edges.max(axis=0) - edges.min(axis=0)) / 2
    return ClockOffset(
        offset_ns=base + float(middle.mean()),
        drift=float((middle[1] - middle[0]) / span),
        reference_ns=reference,
        uncertainty_ns=float(half.max()) + ROUNDING_NS,
        bounds=len(sent_ns) + len(answered_ns),
    )


def _hull(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The lower convex hull [points, 2] (Andrew, 1979): a line below it is below all points."""
    points = np.stack([x, y], axis=1)[np.lexsort((y, x))]
    found: list[np.ndarray] = []
    for point in points:
        while len(found) > 1 and _turn(found[-2], found[-1], point) <= 0:
            found.pop()
        found.append(point)
    return np.array(found)


def _turn(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> float:
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])


def _clip(corners: list[tuple[float, float]], p: float, q: float, bound: float) -> list[tuple[float, float]]:
    """The part of a convex polygon with p·a + q·b <= bound (Sutherland and Hodgman, 1974)."""
    clipped: list[tuple[float, float]] = []
    for (a0, b0), (a1, b1) in zip(corners, corners[1:] + corners[:1], strict=True):
        left, right = bound - p * a0 - q * b0, bound - p * a1 - q * b1
        if left >= 0:
            clipped.append((a0, b0))
        if (left < 0) != (right < 0):
            share = left / (left - right)
            clipped.append((a0 + share * (a1 - a0), b0 + share * (b1 - b0)))
    return clipped
