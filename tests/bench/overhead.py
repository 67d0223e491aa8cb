"""What telemetry costs: twin servers, `telemetry=full` and `off`, with the same requests at the same time.

python -m tests.bench.overhead tiny-model -c 1 -c 8 -c 32 --servers 3 --null --json overhead.json

Over HTTP, streamed; `full` records into a run directory, too. The twins work in short turns, and each has a time of its
own (see tests/bench/twins.py). The requests are cut into blocks of equal work. A figure is a ratio of sums, or of
percentiles of all gaps between tokens, over the blocks of all servers that were started, with a 95 % interval of the
bootstrap, which resamples blocks (Efron, 1979). Gaps in which the turn changed are left out. Microseconds a step are
the difference of the times in which every stream gets one token, those of front and core the CPU time of these
processes. With `--null` there is a third twin, again with `off`: what it seems to cost is what this benchmark cannot
tell apart.

Front, core and client are three processes: where they have two cores, and the model takes both (--threads 0), what the
front does keeps a thread of the model waiting. --threads 1 leaves it a core, which it shares with the client.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from engine.config import model_folder
from metrics.machine import stolen
from tests.bench.results import BenchError, Report, new_report, write_report
from tests.bench.shapes import model_to_bench
from tests.bench.twins import Served, Twins
from tests.bench.variants import check_settings
from tests.bench.workloads import streams

TELEMETRY = {"full": "full", "off": "off"}
NULL = "again"  # the twin that differs in nothing from `off`
BLOCKS = 40  # of one load
WARMING = 2  # requests of each stream, which also tell how many a load has
VOCABULARY = 2500  # the bundled tokenizer has 2,560 ids
RESAMPLES, GAP_RESAMPLES = 10_000, 500
COLUMNS = (
    "tokens/s lost, %",
    "p50 ITL gained, %",
    "p99 ITL gained, %",
    "us a step",
    "front, us a step",
    "core, us a step",
)


class Cost(msgspec.Struct, frozen=True):
    """A difference between full and off, and its 95 % interval."""

    median: float
    low: float
    high: float


class Load(msgspec.Struct):
    """What one twin did, block by block."""

    block_ns: list[float]  # in which equal shares of the tokens came
    gaps_ms: list[list[float]]  # between tokens of one stream, of equal shares of the requests
    steps: float  # in which every stream got one token
    cpu_us: dict[str, float]  # a step, by process


def cost(values: list[float]) -> Cost:
    """The median; the bootstrap's draws are the same at each call."""
    draws = np.random.default_rng(0).choice(values, size=(RESAMPLES, len(values)))
    low, high = np.percentile(np.median(draws, axis=1), (2.5, 97.5))
    return Cost(float(np.median(values)), float(low), float(high))


def loads_of(served: dict[str, Served], concurrency: int, output_len: int) -> dict[str, Load]:
    """Of what all of them have done."""
    progress = {name: each.progress(output_len) for name, each in served.items()}
    tokens = float(min(done[-1] for _, done in progress.values()))
    edges, found = np.linspace(0, tokens, BLOCKS + 1), {}
    for name, (at_ns, done) in progress.items():
        blocks = np.diff(np.interp(edges, done, at_ns))
        gaps = [np.concatenate(share).tolist() for share in _shares(served[name].gaps_ms())]
        steps = float(done[-1]) / concurrency
        cpu = {process: 1e6 * seconds / steps for process, seconds in served[name].cpu_seconds().items()}
        found[name] = Load(blocks.tolist(), gaps, tokens / concurrency, cpu)
    return found


def _shares(gaps: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
    edges = np.linspace(0, len(gaps), min(BLOCKS, len(gaps)) + 1).astype(int)
    return [list(gaps[begin:end]) for begin, end in pairwise(edges)]


def costs(loads: list[Load], base: list[Load]) -> dict[str, Cost]:
    """Of the one over the other, server by server: COLUMNS."""
    taken, of = (np.concatenate([load.block_ns for load in each]) for each in (loads, base))
    step_ns = float(sum(sum(load.block_ns) for load in base) / sum(load.steps for load in base))
    draws = np.random.default_rng(0).integers(0, len(of), (RESAMPLES, len(of)))
    longer = _cost(taken.sum() / of.sum(), taken[draws].sum(axis=1) / of[draws].sum(axis=1), lambda ratio: ratio - 1)
    found = {
        "tokens/s lost, %": Cost(*(100 * more / (1 + more) for more in msgspec.structs.astuple(longer))),
        "us a step": Cost(*(more * step_ns / 1e3 for more in msgspec.structs.astuple(longer))),
    }
    for percent in (50, 99):
        found[f"p{percent} ITL gained, %"] = _gap_cost(loads, base, percent)
    for process in ("front", "core"):
        more = [one.cpu_us[process] - other.cpu_us[process] for one, other in zip(loads, base, strict=True)]
        found[f"{process}, us a step"] = cost(more)
    return {name: found[name] for name in COLUMNS}


def _gap_cost(loads: list[Load], base: list[Load], percent: float) -> Cost:
    shares = [[np.array(share) for load in each for share in load.gaps_ms] for each in (loads, base)]
    count = min(map(len, shares))
    dice, ratios = np.random.default_rng(0), []
    for draw in [np.arange(count), *dice.integers(0, count, (GAP_RESAMPLES, count))]:
        full, off = (np.percentile(np.concatenate([each[place] for place in draw]), percent) for each in shares)
        ratios.append(full / off)
    return _cost(ratios[0], np.array(ratios[1:]), lambda ratio: 100 * (ratio - 1))


def _cost(value: float, resampled: np.ndarray, told) -> Cost:
    return Cost(*(float(told(each)) for each in (value, *np.percentile(resampled, (2.5, 97.5)))))


def measure(report: Report, model: str, settings: dict, options: argparse.Namespace) -> None:
    """Fills the report, server by server; it is written after each, so that nothing is lost."""
    telemetry = TELEMETRY | ({NULL: "off"} if options.null else {})
    loads: dict[tuple[str, int], list[Load]] = {}
    for number in range(options.servers):
        order = dict(sorted(telemetry.items(), reverse=number % 2 == 1))
        with Twins(model, settings, order) as twins:
            for concurrency in options.concurrency:
                with stolen() as percent:
                    found = one_load(twins, concurrency, number, options)
                for name, load in found.items():
                    loads.setdefault((name, concurrency), []).append(load)
                    report.at(name, f"c={concurrency}").add(_figures(load, concurrency, percent()))
        for concurrency in options.concurrency:
            base = loads["off", concurrency]
            for name in telemetry:
                if name != "off":
                    told = costs(loads[name, concurrency], base)
                    report.at(name, f"c={concurrency}").facts = {
                        column: msgspec.to_builtins(told[column]) for column in told
                    }
        if options.json is not None:
            write_report(report, options.json)


def one_load(twins: Twins, concurrency: int, number: int, options: argparse.Namespace) -> dict[str, Load]:
    seed = 1000 * (number + 1) + concurrency
    turn, length = options.turn_ms / 1e3, options.output_len
    warming = streams(concurrency * WARMING, options.input_len, length, 10**6 + seed, VOCABULARY)
    warm = twins.serve(warming, concurrency, turn)["off"]
    request_seconds = sum(each.end_ns - each.begin_ns for each in warm.turns) / 1e9 / WARMING
    each = max(WARMING, round(options.seconds / request_seconds))
    workload = streams(concurrency * each, options.input_len, length, seed, VOCABULARY)
    return loads_of(twins.serve(workload, concurrency, turn), concurrency, length)


def _figures(load: Load, concurrency: int, steal: float | None) -> dict[str, float]:
    gaps = np.concatenate(load.gaps_ms)
    figures = {
        "output_tokens_per_s": 1e9 * concurrency * load.steps / sum(load.block_ns),
        "itl_p50_ms": float(np.percentile(gaps, 50)),
        "itl_p99_ms": float(np.percentile(gaps, 99)),
    }
    figures |= {f"{process}_cpu_us_per_step": taken for process, taken in load.cpu_us.items()}
    return figures if steal is None else figures | {"steal_percent": steal}


def table(report: Report, concurrency: list[int]) -> Table:
    shown = Table(title=f"{report.title}: over off, with 95 % intervals")
    for column in ("", "", "tokens/s off", "stolen, %", *COLUMNS):
        shown.add_column(column, justify="right")
    for streams_at_once in concurrency:
        point = f"c={streams_at_once}"
        off = report.at("off", point)
        rate, steal = off.median("output_tokens_per_s"), off.median("steal_percent")
        for told in [each for each in report.points if each.point == point and each.facts]:
            found = [msgspec.convert(told.facts[column], Cost) for column in COLUMNS]
            cells = [f"{each.median:+.1f} ({each.low:+.1f} to {each.high:+.1f})" for each in found]
            shown.add_row(point, told.engine, f"{rate:,.1f}", "-" if steal is None else f"{steal:.1f}", *cells)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="CHECKPOINT", help="a checkpoint, or a shape such as 100m")
    parser.add_argument("-c", "--concurrency", type=int, action="append", help="repeatable; 1, 8 and 32 by default")
    parser.add_argument("--servers", type=int, default=2, help="how many times they are started")
    parser.add_argument("--seconds", type=float, default=60, help="of each twin's time, for each load")
    parser.add_argument("--turn-ms", type=float, default=50, help="on average; some steps of the model are to fit")
    parser.add_argument("--null", action="store_true", help="a third twin, with telemetry=off once more")
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--threads", type=int, default=0, help="of the model; 0 is one for each core")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.concurrency = options.concurrency or [1, 8, 32]
    if min(options.servers, options.turn_ms, options.seconds, *options.concurrency) <= 0:
        raise BenchError("--servers, --turn-ms, --seconds and -c must be more than 0")
    with tempfile.TemporaryDirectory(prefix="sojourn-bench-") as scratch:
        model, load_format = model_to_bench(options.model, Path(scratch))
        if Path(scratch) in Path(model).parents:  # a shape, which has no tokenizer of its own
            shutil.copy(model_folder("tiny-model") / "tokenizer.json", model)
        longest = -(-(options.input_len + options.output_len) // 256) * 256
        settings = {
            "load_format": load_format, "max_model_len": longest, "num_kv_blocks": 64 * longest // 16,
            "threads": options.threads,
        }  # fmt: skip
        check_settings(model, settings)
        title = f"{Path(model).name}, streamed over HTTP, {options.input_len} in, {options.output_len} out"
        report = new_report("overhead", title)
        report.command = " ".join(["python -m tests.bench.overhead", *sys.argv[1:]])
        measure(report, model, settings, options)
        Console(width=200).print(table(report, options.concurrency))


if __name__ == "__main__":
    try:
        main()
    except BenchError as error:
        sys.exit(f"overhead: {error}")
