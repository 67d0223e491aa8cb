"""ServeGen: for each client of a service its rate in each ten minutes, and the lengths of its requests.

Xiang et al., "ServeGen", NSDI 2026. `chunk-<i>-trace.csv` has no header: second, requests a second, coefficient of
variation of the gaps, Gamma or Weibull (or nothing: silent), and two fitted parameters. `chunk-<i>-dataset.json` has
for some seconds `input_tokens` and `output_tokens` as text, {tokens: probability}. Requests are drawn by client and
window: gaps of that rate, variation and family, and those lengths.
"""

import ast
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from sojourn.loadgen.errors import ScenarioError
from sojourn.loadgen.seeds import seeded_rng
from sojourn.loadgen.traces.row import Head, Tally, TraceForm, TraceRow, Window, bad_line, csv_lines

FAMILIES = ("Gamma", "Weibull")
GAPS_A_DRAW = 256
LONGEST_WINDOW_S = 600.0  # of the last line, which has no next one
NO_LENGTHS = "windows of a client without lengths"
_TRACE_FILE = re.compile(r"chunk-(\d+)-trace\.csv")
_LINE = re.compile(r"\d+,[0-9.eE+-]*,[0-9.eE+-]*,(Gamma|Weibull)?,[^,]*,[^,]*$")


@dataclass(frozen=True, slots=True)
class Rate:
    """One client in one window."""

    begin_s: float
    end_s: float
    rate_rps: float
    cv: float
    family: str


Histogram = tuple[np.ndarray, np.ndarray]  # tokens, cumulated probability


def _recognises(head: Head) -> bool:
    return bool(_TRACE_FILE.fullmatch(head.path.name) or _LINE.match(head.first_line))


def _rows(path: Path, window: Window, tally: Tally) -> Iterator[TraceRow]:
    """`path` is the trace of one client, or the folder of all. Only windows that overlap the wanted one are drawn."""
    files = sorted(path.glob("chunk-*-trace.csv")) if path.is_dir() else [path]
    for file in files:
        lengths = _lengths(file.with_name(file.name.replace("-trace.csv", "-dataset.json")))
        for rate in _rates(file):
            if rate.end_s <= window.start_s or rate.begin_s >= window.end_s or not rate.rate_rps:
                continue
            known = [moment for moment in lengths if moment <= rate.begin_s]
            if not known:
                tally[NO_LENGTHS] += 1
                continue
            rng = seeded_rng(window.seed, file.name, rate.begin_s)
            yield from _arrivals(rate, lengths[known[-1]], file.stem.removesuffix("-trace"), rng)


def _arrivals(rate: Rate, lengths: dict[str, Histogram], client: str, rng: np.random.Generator) -> Iterator[TraceRow]:
    at_s = rate.begin_s - float(_gaps(rate, 1, rng)[0] * rng.random())  # the window begins somewhere within a gap
    while at_s < rate.end_s:
        times_s = at_s + np.cumsum(_gaps(rate, GAPS_A_DRAW, rng))
        prompts, outputs = (_draw(lengths[name], GAPS_A_DRAW, rng) for name in ("input_tokens", "output_tokens"))
        for at_s, prompt, output in zip(times_s.tolist(), prompts, outputs, strict=True):
            if rate.begin_s <= at_s < rate.end_s:
                yield TraceRow(at_s, prompt, output, session_id=client)


def _gaps(rate: Rate, count: int, rng: np.random.Generator) -> np.ndarray:
    mean = 1 / rate.rate_rps
    if rate.cv == 0:
        return np.full(count, mean)
    if rate.family == "Gamma":
        return rng.gamma(1 / rate.cv**2, mean * rate.cv**2, count)
    shape = weibull_shape(rate.cv)
    return rng.weibull(shape, count) * mean / math.gamma(1 + 1 / shape)


@lru_cache(maxsize=4096)
def weibull_shape(cv: float) -> float:
    """The shape of a Weibull whose standard deviation over its mean is `cv`, by bisection; from 0.1 to 100."""
    low, high = 0.1, 100.0
    for _ in range(60):
        middle = math.sqrt(low * high)
        found = math.gamma(1 + 2 / middle) / math.gamma(1 + 1 / middle) ** 2 - 1
        low, high = (middle, high) if found > cv**2 else (low, middle)
    return low


def _draw(histogram: Histogram, count: int, rng: np.random.Generator) -> list[int]:
    tokens, cumulated = histogram
    places = np.searchsorted(cumulated, rng.random(count) * cumulated[-1], "right")
    return tokens[np.minimum(places, len(tokens) - 1)].tolist()


def _rates(file: Path) -> Iterator[Rate]:
    lines = []
    for number, cells in csv_lines(file, has_header=False):
        try:
            begin_s, rate, cv, family = float(cells[0]), float(cells[1] or 0), float(cells[2] or 0), cells[3]
            if len(cells) != 6 or family not in ("", *FAMILIES) or not (begin_s >= 0 and rate >= 0 and cv >= 0):
                raise ValueError
        except (ValueError, IndexError):
            shown = ",".join(cells)[:80]
            raise bad_line(
                file, number, f"{shown!r} is not second,rate,cv,Gamma or Weibull,parameter,parameter"
            ) from None
        lines.append((begin_s, rate if family else 0.0, cv, family))
    if [line[0] for line in lines] != sorted({line[0] for line in lines}):
        raise ScenarioError(f"{file.name}: its seconds do not rise from line to line")
    for (begin_s, rate, cv, family), after in zip(lines, [*lines[1:], None], strict=True):
        yield Rate(begin_s, after[0] if after else begin_s + LONGEST_WINDOW_S, rate, cv, family)


def _lengths(file: Path) -> dict[float, dict[str, Histogram]]:
    """By the second from which they apply. A window with empty lengths is left out."""
    try:
        windows = json.loads(file.read_text(encoding="utf-8"))
        found = {float(moment): {name: _histogram(fields[name]) for name in ("input_tokens", "output_tokens")}
                 for moment, fields in windows.items()}  # fmt: skip
    except OSError:
        raise ScenarioError(
            f"{file.name} is missing beside its trace; it has the lengths of that client's requests"
        ) from None
    except (ValueError, SyntaxError, KeyError, TypeError, AttributeError) as error:
        raise ScenarioError(f"{file.name} is not second → input_tokens, output_tokens: {error}") from None
    return {moment: fields for moment, fields in sorted(found.items()) if all(len(each[0]) for each in fields.values())}


def _histogram(text: str) -> Histogram:
    shares = {int(tokens): float(share) for tokens, share in ast.literal_eval(text).items()}
    if any(tokens < 0 or not share >= 0 for tokens, share in shares.items()) or (shares and not sum(shares.values())):
        raise ValueError("a length or a probability is negative, or none is above 0")
    tokens = np.array(sorted(shares), dtype=np.int64)
    return tokens, np.cumsum([shares[size] for size in tokens.tolist()])


SERVEGEN = TraceForm("servegen", "a folder of chunk-<i>-trace.csv (second,rate,cv,Gamma or Weibull,…) beside "
                     "chunk-<i>-dataset.json, or one of those traces (ServeGen)", _recognises, _rows)  # fmt: skip
