"""What telemetry costs: twin servers, `telemetry=full` and `off`, with the same requests at the same time.

python -m bench.overhead tiny-model -c 1 -c 8 -c 32 --servers 3 --null --json overhead.json

Over HTTP, streamed; `full` records into a run directory, too. The twins work in short turns, and each has a time of its
own (see bench/twins.py). The requests are cut into blocks of equal work. A figure is a ratio of sums, or of
percentiles of all gaps between tokens, over the blocks of all servers that were started, with a 95 % interval of the
bootstrap (Efron, 1979). Fronts of the same settings differ by one or two per cent for as long as they live, depending
on where their memory lies. So the bootstrap resamples twins, and then the blocks of each, once there are FEWEST_PAIRS
of each setting, by --servers and --alike; with fewer only blocks, and what differs from start to start is not in the
interval. Gaps in which the turn changed are left out. Microseconds a step are the difference of
the times in which every stream gets one token, those of front and core the CPU time of these processes. With `--null`
there are twins with `off` once more: what they seem to cost is what this benchmark cannot tell apart. With `--core`
there are some that keep books in the core and none in the front.

Front, core and client are three processes: where they have two cores, and the model takes both (--threads 0), what the
front does keeps a thread of the model waiting. --threads 1 leaves it a core, which it shares with the client.
"""

import argparse
import shutil
import signal
import sys
import tempfile
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from bench.results import BenchError, Report, new_report, write_report
from bench.shapes import model_to_bench
from bench.twins import Served, Telemetry, Twins
from bench.variants import check_settings
from bench.workloads import streams
from engine.config import model_folder
from metrics.machine.host import stolen

FULL, OFF = Telemetry("full", "full"), Telemetry("off", "off")
TELEMETRY = {"full": FULL, "off": OFF}
NULL = {"again": OFF}  # the twin that differs in nothing from `off`
CORE = {"core": Telemetry(front="off", core="full")}
BLOCKS = 40  # of one load
WARMING = 2  # requests of each stream, which also tell how many a load has
VOCABULARY = 2500  # the bundled tokenizer has 2,560 ids
RESAMPLES, GAP_RESAMPLES = 2_000, 300
FEWEST_PAIRS = 4  # of twins, full and off, that stand for all there could be
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

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Load:
    """What one twin did, block by block."""

    steps: float  # in which every stream got one token
    block_ns: np.ndarray  # in which equal shares of the tokens came
    cpu_us: dict[str, np.ndarray]  # in these, by process
    gaps_ms: list[np.ndarray]  # between tokens of one stream, of equal shares of the requests


def cost(values: list[float]) -> Cost:
    """The median; the bootstrap's draws are the same at each call."""
    draws = np.random.default_rng(0).choice(values, size=(RESAMPLES, len(values)))
    low, high = np.percentile(np.median(draws, axis=1), (2.5, 97.5))
    return Cost(float(np.median(values)), float(low), float(high))


def load_of(served: Served, concurrency: int, output_len: int) -> Load:
    at_ns, tokens = served.progress(output_len)
    edges_ns = np.interp(np.linspace(0, tokens[-1], BLOCKS + 1), tokens, at_ns)
    gaps = served.gaps_ms()
    places = np.linspace(0, len(gaps), min(BLOCKS, len(gaps)) + 1).astype(int)
    shares = [np.concatenate(gaps[begin:end]) for begin, end in pairwise(places)]
    if min(map(len, shares)) == 0:
        raise BenchError("no token came in the same turn as the one before it; give longer turns with --turn-ms")
    cpu = {process: np.diff(taken) for process, taken in served.cpu_us(edges_ns).items()}
    return Load(float(tokens[-1]) / concurrency, np.diff(edges_ns), cpu, shares)


def costs(loads: list[Load], base: list[Load]) -> dict[str, Cost]:
    """Of the one over the other, twin by twin: COLUMNS."""
    taken, of = (np.stack([load.block_ns for load in each]) for each in (loads, base))
    steps = sum(load.steps for load in base)
    draws = _draws(*of.shape, RESAMPLES)
    ratios = taken[draws].sum(axis=(1, 2)) / of[draws].sum(axis=(1, 2))
    found = {"tokens/s lost, %": _cost(100 * (1 - of.sum() / taken.sum()), 100 * (1 - 1 / ratios))}
    for percent in (50, 99):
        found[f"p{percent} ITL gained, %"] = _gap_cost(loads, base, percent)
    more = {"us a step": (taken - of) / 1e3}
    for process in ("front", "core"):
        full, off = (np.stack([load.cpu_us[process] for load in each]) for each in (loads, base))
        more[f"{process}, us a step"] = full - off
    for name, block_us in more.items():
        found[name] = _cost(block_us.sum() / steps, block_us[draws].sum(axis=(1, 2)) / steps)
    return found


def _draws(pairs: int, parts: int, resamples: int) -> tuple[np.ndarray, np.ndarray]:
    """Of twins, and of the parts of each: [resamples, pairs, 1] and [resamples, pairs, parts]."""
    dice = np.random.default_rng(0)
    few = pairs < FEWEST_PAIRS
    drawn = np.tile(np.arange(pairs), (resamples, 1)) if few else dice.integers(0, pairs, (resamples, pairs))
    return drawn[:, :, None], dice.integers(0, parts, (resamples, pairs, parts))


def _gap_cost(loads: list[Load], base: list[Load], percent: float) -> Cost:
    full, off = ([load.gaps_ms for load in each] for each in (loads, base))
    parts = min(map(len, full + off))

    def gained(pairs: np.ndarray, places: np.ndarray) -> float:
        drawn = [(pair, at) for pair, own in zip(pairs[:, 0], places, strict=True) for at in own]
        with_it, without = (
            np.percentile(np.concatenate([each[i][k] for i, k in drawn]), percent) for each in (full, off)
        )
        return 100 * (with_it / without - 1)

    resampled = [gained(*each) for each in zip(*_draws(len(off), parts, GAP_RESAMPLES), strict=True)]
    with_it, without = (np.percentile(np.concatenate(list(chain(*each))), percent) for each in (full, off))
    return _cost(100 * (with_it / without - 1), np.array(resampled))


def _cost(value: float, resampled: np.ndarray) -> Cost:
    return Cost(float(value), *(float(each) for each in np.percentile(resampled, (2.5, 97.5))))


def measure(report: Report, model: str, settings: dict, options: argparse.Namespace) -> None:
    """Fills the report, server by server; it is written after each, so that nothing is lost."""
    kinds = TELEMETRY | (NULL if options.null else {}) | (CORE if options.core else {})
    telemetry = {f"{kind}-{number}": told for number in range(options.alike) for kind, told in kinds.items()}
    loads: dict[tuple[str, int], list[Load]] = {}
    for number in range(options.servers):
        order = dict(sorted(telemetry.items(), reverse=number % 2 == 1))
        with Twins(model, settings, order) as twins:
            for concurrency in options.concurrency:
                with stolen() as percent:
                    found = one_load(twins, concurrency, number, options)
                for name, load in sorted(found.items()):
                    kind = name.rpartition("-")[0]
                    loads.setdefault((kind, concurrency), []).append(load)
                    report.at(kind, f"c={concurrency}").add(
                        figures_of(load, concurrency, options.output_len, percent())
                    )
        for concurrency in options.concurrency:
            base = loads["off", concurrency]
            for kind in kinds:
                if kind != "off":
                    report.at(kind, f"c={concurrency}").facts = facts_of(loads[kind, concurrency], base)
        if options.json is not None:
            write_report(report, options.json)


def facts_of(loads: list[Load], base: list[Load]) -> dict[str, object]:
    """As a report keeps them, and `table` shows them."""
    return {name: msgspec.to_builtins(found) for name, found in costs(loads, base).items()}


def one_load(twins: Twins, concurrency: int, number: int, options: argparse.Namespace) -> dict[str, Load]:
    seed = 1000 * (number + 1) + concurrency
    turn, length = options.turn_ms / 1e3, options.output_len
    warming = streams(concurrency * WARMING, options.input_len, length, 10**6 + seed, VOCABULARY)
    warm = twins.serve(warming, concurrency, turn)["off-0"]
    request_seconds = sum(each.end_ns - each.begin_ns for each in warm.turns) / 1e9 / WARMING
    requests_per_stream = max(WARMING, round(options.seconds / request_seconds))
    workload = streams(concurrency * requests_per_stream, options.input_len, length, seed, VOCABULARY)
    served = twins.serve(workload, concurrency, turn)
    return {name: load_of(each, concurrency, length) for name, each in served.items()}


def figures_of(load: Load, concurrency: int, output_len: int, steal: float | None) -> dict[str, float]:
    gaps = np.concatenate(load.gaps_ms)
    counted = load.steps * concurrency * (output_len - 1) / output_len
    figures = {
        "output_tokens_per_s": 1e9 * concurrency * load.steps / load.block_ns.sum(),
        "itl_p50_ms": np.percentile(gaps, 50),
        "itl_p99_ms": np.percentile(gaps, 99),
        "gaps_left_out_percent": 100 * (1 - len(gaps) / counted),  # the turn changed, or two tokens came as one text
    }
    figures |= {f"{process}_cpu_us_per_step": taken.sum() / load.steps for process, taken in load.cpu_us.items()}
    if steal is not None:
        figures["steal_percent"] = steal
    return {name: float(value) for name, value in figures.items()}


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
            cells = [f"{each.value:+.1f} ({each.low:+.1f} to {each.high:+.1f})" for each in found]
            shown.add_row(point, told.engine, f"{rate:,.1f}", "-" if steal is None else f"{steal:.1f}", *cells)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="CHECKPOINT", help="a checkpoint, or a shape such as 100m")
    parser.add_argument("-c", "--concurrency", type=int, action="append", help="repeatable; 1, 8 and 32 by default")
    parser.add_argument("--servers", type=int, default=2, help="how many times they are started")
    parser.add_argument("--alike", type=int, default=1, help="twins of each setting, for each start")
    parser.add_argument("--seconds", type=float, default=60, help="of each twin's time, for each load")
    parser.add_argument("--turn-ms", type=float, default=50, help="on average; some steps of the model are to fit")
    parser.add_argument("--null", action="store_true", help="more twins, with telemetry=off once more")
    parser.add_argument("--core", action="store_true", help="more twins, with books in the core alone")
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--threads", type=int, default=0, help="of the model; 0 is one for each core")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was stopped is let go, and ended
    options.concurrency = options.concurrency or [1, 8, 32]
    if min(options.servers, options.alike, options.turn_ms, options.seconds, *options.concurrency) <= 0:
        raise BenchError("--servers, --alike, --turn-ms, --seconds and -c must be more than 0")
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
        report.command = " ".join(["python -m bench.overhead", *sys.argv[1:]])
        measure(report, model, settings, options)
        Console(width=200).print(table(report, options.concurrency))


if __name__ == "__main__":
    try:
        main()
    except BenchError as error:
        sys.exit(f"overhead: {error}")
