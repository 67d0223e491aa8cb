"""Figures of the page: errors of cells, of ratios, of a calibrated deployment, of objectives, and of intervals."""

import zlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from bench.silicon.judged import Estimated
from sojourn.replay.device.estimate import Deployment
from sojourn.replay.device.known_errors import ANY, Cell, RatioCell, kinds_of_ratio

FEWEST = 8  # measurements of a cell that speaks for itself
BOUND = 1.25  # an answer is useful within this factor
BOUNDS_MS = (10, 15, 20, 25, 30, 40, 50, 75, 100)  # of TPOT, as objectives have it
EXTRAPOLATED = 2.0  # times the concurrencies that were measured
HOST_NS = np.arange(0, 3.01e6, 5e4)  # of a step, that are tried
QUANTILES = (0.03, 0.97)  # of a cell: as much of one half holds 80 % of the other; see `coverage`


class Errors(NamedTuple):
    """Of estimated / measured - 1, in shares."""

    n: int
    median: float  # of the absolute values
    p90: float
    bias: float

    def text(self) -> str:
        return f"{100 * self.median:.1f} / {100 * self.p90:.0f} / {100 * self.bias:+.0f}" if self.n else "–"


def errors(values: Iterable[float]) -> Errors:
    found = np.array(list(values), dtype=float)
    found = found[~np.isnan(found)]
    if not len(found):
        return Errors(0, np.nan, np.nan, np.nan)
    size = np.abs(found)
    return Errors(len(found), float(np.median(size)), float(np.quantile(size, 0.9)), float(np.median(found)))


def tpot(of: Iterable[Estimated]) -> Errors:
    return errors(each.error for each in of)


def e2e(of: Iterable[Estimated]) -> Errors:
    return errors(each.e2e_ms / each.measured.e2e_ms - 1 for each in of)


def ttft(of: Iterable[Estimated]) -> Errors:
    return errors(each.ttft_ms / each.measured.ttft_ms - 1 for each in of)


def half_of(deployment: Deployment) -> int:
    """0 or 1, the same in every run: halves are of deployments, so that none is in both."""
    return zlib.crc32(msgspec.json.encode(deployment)) & 1


def grouped(of: Iterable[Estimated], key: Callable[[Estimated], Hashable]) -> dict[Hashable, list[Estimated]]:
    found: dict[Hashable, list[Estimated]] = defaultdict(list)
    for each in of:
        found[key(each)].append(each)
    return dict(found)


def cell_of(each: Estimated) -> tuple[str, str, str, str]:
    d = each.measured.deployment
    return d.model, d.device, d.backend, d.weight_format


def host_times(of: Sequence[Estimated]) -> dict[str, float]:
    """Of a step, by backend, ns: that with the least error of TPOT, as the mean of the medians of all cells, tried on
    estimates without one."""
    found = {}
    for backend, rows in grouped(of, lambda each: each.measured.deployment.backend).items():
        groups = [
            (np.array([each.error for each in rows]),
             np.array([each.steps_per_token / 1e6 / each.measured.tpot_ms for each in rows]))
            for rows in grouped(rows, cell_of).values()
        ]  # fmt: skip
        trials = [
            (float(np.mean([np.median(np.abs(error + host_ns * each)) for error, each in groups])), host_ns)
            for host_ns in HOST_NS
        ]
        found[str(backend)] = float(min(trials)[1])
    return found


def _ratios(of: Sequence[Estimated]) -> np.ndarray:
    """Measured / estimated."""
    return np.array([each.measured.tpot_ms / each.tpot_ms for each in of])


def cells(of: Sequence[Estimated]) -> list[Cell]:
    """All cells with enough measurements, and the wider ones around them."""
    found = []
    for parts in ((0, 1, 2, 3), (1, 2, 3), (1, 2), (2,), ()):
        for key, rows in grouped(of, lambda each, p=parts: tuple(cell_of(each)[i] if i in p else ANY for i in range(4))
                                 ).items():  # fmt: skip
            if len(rows) < FEWEST:
                continue
            said, (low, high) = tpot(rows), np.quantile(_ratios(rows), QUANTILES)
            model, device, backend, weights = key
            degrees = tuple(sorted({each.measured.deployment.tensor_parallel for each in rows}))
            found.append(
                Cell(model=model, device=device, backend=backend, weight_format=weights, degrees=degrees,
                     measurements=said.n, median=round(said.median, 4), p90=round(said.p90, 4),
                     bias=round(said.bias, 4), low=round(float(low), 4), high=round(float(high), 4))
            )  # fmt: skip
    return found


def coverage(of: Sequence[Estimated], keys: Callable[[Deployment], list]) -> tuple[float, int]:
    """Share of one half whose measured TPOT lies within the interval of the other half's cells; both ways together."""
    inside, count = 0, 0
    for half in (0, 1):
        known = {cell.key: cell for cell in cells([e for e in of if half_of(e.measured.deployment) == half])}
        for each in of:
            deployment = each.measured.deployment
            if half_of(deployment) == half:
                continue
            cell = next((known[key] for key in keys(deployment) if key in known), None)
            if cell is not None:
                count += 1
                inside += cell.low <= each.measured.tpot_ms / each.tpot_ms <= cell.high
    return float(inside) / max(count, 1), count


class Pair(NamedTuple):
    """Two deployments that differ in one thing, at the same load: estimated / measured ratio of their TPOTs."""

    kind: str
    first: str
    second: str
    backend: str
    ratio: float
    half: int = 0  # of its first deployment


def pairs(of: Sequence[Estimated]) -> list[Pair]:
    """Each value of a deployment beside the next larger one: devices in both directions of all, degrees that double."""
    points: dict[tuple, list[Estimated]] = grouped(of, lambda each: each.measured.point)
    mean = {
        point: (np.mean([e.measured.tpot_ms for e in rows]), rows[0].tpot_ms) for point, rows in points.items()
    }  # fmt: skip
    found = []
    for kind in ("device", "tensor_parallel", "weight_format"):
        others: dict[tuple, list[tuple]] = defaultdict(list)
        for point in mean:
            plain = msgspec.structs.replace(point[0], **{kind: "" if kind != "tensor_parallel" else 0})
            if kind == "tensor_parallel":
                plain = msgspec.structs.replace(plain, expert_parallel=1)
            others[(plain, *point[1:])].append(point)
        for group in others.values():
            for one in group:
                for other in group:
                    first, second = getattr(one[0], kind), getattr(other[0], kind)
                    if first == second or (kind == "tensor_parallel" and second != 2 * first):
                        continue
                    if kind == "tensor_parallel" and (one[0].expert_parallel == 1) != (other[0].expert_parallel == 1):
                        continue
                    (m1, e1), (m2, e2) = mean[one], mean[other]
                    found.append(
                        Pair(kind, str(first), str(second), one[0].backend, (e2 / e1) / (m2 / m1), half_of(one[0]))
                    )
    return found


def ratio_cells(of: Sequence[Pair]) -> list[RatioCell]:
    found = []
    for names in kinds_of_ratio():
        groups: dict[tuple, list[float]] = defaultdict(list)
        for pair in of:
            groups[tuple(getattr(pair, name) if name in names else ANY for name in RatioCell.KEY)].append(pair.ratio)
        for key, ratios in groups.items():
            if len(ratios) < FEWEST:
                continue
            said = errors(ratio - 1 for ratio in ratios)
            low, high = np.quantile(1 / np.array(ratios), QUANTILES)
            found.append(
                RatioCell(**dict(zip(RatioCell.KEY, key, strict=True)), measurements=said.n,
                          median=round(said.median, 4), p90=round(said.p90, 4), low=round(float(low), 4),
                          high=round(float(high), 4))
            )  # fmt: skip
    return found


def ratio_coverage(of: Sequence[Pair]) -> tuple[float, int]:
    """As `coverage`, of ratios."""
    inside, count = 0, 0
    for half in (0, 1):
        known = {cell.key: cell for cell in ratio_cells([pair for pair in of if pair.half == half])}
        for pair in of:
            if pair.half == half:
                continue
            keys = [
                tuple(getattr(pair, name) if name in names else ANY for name in RatioCell.KEY)
                for names in kinds_of_ratio()
            ]
            cell = next((known[key] for key in keys if key in known), None)
            if cell is not None:
                count += 1
                inside += cell.low <= 1 / pair.ratio <= cell.high
    return float(inside) / max(count, 1), count


def one_point(of: Sequence[Estimated], *, same_lengths: bool = False) -> Errors:
    """TPOT at the other loads of a deployment, where the middle one was measured; with `same_lengths` at other
    concurrencies of that load alone."""
    return tpot(by_one_point(of, same_lengths=same_lengths))


def by_one_point(of: Sequence[Estimated], *, same_lengths: bool = False) -> list[Estimated]:
    """The other loads, their TPOT corrected by that of the middle one."""

    def load(each: Estimated) -> tuple[int, int, int]:
        return each.measured.concurrency, each.measured.prompt_tokens, each.measured.output_tokens

    def known(each: Estimated) -> Hashable:
        return each.measured.deployment, *(load(each)[1:] if same_lengths else ())

    found = []
    for rows in grouped(of, known).values():
        loads = sorted({load(each) for each in rows})
        if len(loads) < 2:
            continue
        chosen = loads[len(loads) // 2]
        factor = float(np.median([e.measured.tpot_ms / e.tpot_ms for e in rows if load(e) == chosen]))
        found += [e._replace(tpot_ms=factor * e.tpot_ms) for e in rows if load(e) != chosen]
    return found


class Answers(NamedTuple):
    """Of the largest concurrency under a bound of TPOT: promised / true."""

    n: int
    useful: float  # share within BOUND
    promises: float  # share that promise more than BOUND times what is true


def concurrency_answers(of: Sequence[Estimated]) -> Answers:
    """For each load, and each bound of BOUNDS_MS that lies within the measured curve: how many requests at a time keep
    it, by the estimated curve over the measured one."""
    found = []
    for rows in grouped(
        of, lambda each: (each.measured.deployment, each.measured.prompt_tokens, each.measured.output_tokens)
    ).values():
        by = grouped(rows, lambda each: each.measured.concurrency)
        if len(by) < 3:
            continue
        sizes = np.array(sorted(by), dtype=float)
        measured = np.array([np.median([e.measured.tpot_ms for e in by[int(c)]]) for c in sizes])
        estimated = np.array([by[int(c)][0].tpot_ms for c in sizes])
        if (np.diff(measured) <= 0).any() or (np.diff(estimated) <= 0).any():
            continue  # no one concurrency belongs to a bound
        found += [
            _largest(sizes, estimated, bound) / _largest(sizes, measured, bound)
            for bound in BOUNDS_MS if measured[0] <= bound <= measured[-1]
        ]  # fmt: skip
    if not found:
        return Answers(0, np.nan, np.nan)
    ratio = np.array(found)
    useful = (ratio <= BOUND) & (ratio >= 1 / BOUND)
    return Answers(len(ratio), float(useful.mean()), float((ratio > BOUND).mean()))


def _largest(sizes: np.ndarray, tpot_ms: np.ndarray, bound: float) -> float:
    """The concurrency at which a curve meets a bound: straight between logarithms, and on by its last slopes."""
    x, y = np.log(sizes), np.log(tpot_ms)
    if bound <= tpot_ms[0]:
        slope, place = (x[1] - x[0]) / (y[1] - y[0]), 0
    elif bound >= tpot_ms[-1]:
        slope, place = (x[-1] - x[-2]) / (y[-1] - y[-2]), -1
    else:
        return float(np.exp(np.interp(np.log(bound), y, x)))
    found = float(np.exp(x[place] + slope * (np.log(bound) - y[place])))
    return float(np.clip(found, sizes[0] / EXTRAPOLATED, EXTRAPOLATED * sizes[-1]))


def repeated(of: Sequence[Estimated]) -> tuple[int, float]:
    """Points that were measured more than once, and the 90th percentile of the largest over the smallest."""
    spans = [
        max(values) / min(values)
        for rows in grouped(of, lambda each: each.measured.point).values()
        if len(values := [e.measured.tpot_ms for e in rows]) > 1
    ]
    return len(spans), float(np.quantile(spans, 0.9)) if spans else float("nan")
