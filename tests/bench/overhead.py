"""What telemetry costs: `telemetry=full` against `off`, the same requests to both in interleaved pairs.

python -m tests.bench.overhead tiny-model -c 1 -c 8 -c 32 --pairs 6 --json overhead.json
python -m tests.bench.overhead 100m --offline

Over HTTP `full` records into a run directory, too. Each pair starts servers of its own: how fast a process is depends
on where its memory happens to lie, by some per cent, and that would pass for a cost. They are loaded in short rounds,
full, off, off, full: what drifts on the machine meets both alike; a round in which other machines got more than
STEAL_WARNS_PERCENT of the CPU time is left out. A pair's figures are medians of its rounds; a figure is the median over
the pairs of full over off, with a 95 % interval of the bootstrap (Efron, 1979). Microseconds a step are the difference
of the times in which every stream gets one token. Those of front and core are CPU time of the two processes, which is
counted in ticks of 10 ms, so the mean of all rounds. The median time between tokens is of all rounds, too: what meets
some tokens of a hundred does not move it.

What comes less than once a round (a batch of steps every five seconds, a flush of the recorder every second) partly
meets the rounds of the other server, which then waits for a core: give --requests-per-stream for longer rounds.

Front, core and client are three processes: where they have two cores, and the model takes both (--threads 0), what the
front does keeps a thread of the model waiting. --threads 1 leaves it a core, which it shares with the client.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from engine.config import model_folder
from metrics.machine import STEAL_WARNS_PERCENT, stolen
from tests.bench.client_process import Client
from tests.bench.contenders import ours
from tests.bench.results import BenchError, Report, new_report, write_report
from tests.bench.servers import our_server
from tests.bench.shapes import model_to_bench
from tests.bench.variants import check_settings
from tests.bench.workloads import Workload, streams

TELEMETRY = ("full", "off")
STOLEN, RATE = "steal_percent", "output_tokens_per_s"
OF_ALL_ROUNDS = {"itl_p50_ms": np.median, "front_cpu_us_per_step": np.mean, "core_cpu_us_per_step": np.mean}
VOCABULARY = 2500  # the bundled tokenizer has 2,560 ids
RESAMPLES = 10_000
Round = dict[str, dict[str, float]]  # full or off → figures
Measure = Callable[[str, Workload, int], dict[str, float]]  # (full or off, requests, concurrency) → figures


class Cost(msgspec.Struct, frozen=True):
    """A difference between full and off: the median over pairs, and its 95 % interval."""

    median: float
    low: float
    high: float


def cost(values: list[float]) -> Cost:
    """The bootstrap resamples pairs. Draws are the same at each call."""
    draws = np.random.default_rng(0).choice(values, size=(RESAMPLES, len(values)))
    low, high = np.percentile(np.median(draws, axis=1), (2.5, 97.5))
    return Cost(float(np.median(values)), float(low), float(high))


def costs(report: Report, point: str, concurrency: int) -> dict[str, Cost]:
    """Percent of tokens/s lost, percent of p50 and p99 ITL gained (over HTTP), and microseconds a step."""
    full, off = (report.at(name, point).figures for name in TELEMETRY)
    found = {}
    if "itl_p50_ms" in full:
        found["p50 ITL gained, %"] = gained(report, point, "itl_p50_ms")
    for process in ("front", "core"):
        name = f"{process}_cpu_us_per_step"
        if name in full:
            taken = zip(full[name], off[name], strict=True)
            found[f"{process}, us a step"] = cost([with_it - without for with_it, without in taken])
    if "itl_p99_ms" in full:
        found["p99 ITL gained, %"] = gained(report, point, "itl_p99_ms")
    if RATE in full:  # some round was kept
        pairs = list(zip(full[RATE], off[RATE], strict=True))
        found["tokens/s lost, %"] = cost([100 * (1 - with_it / without) for with_it, without in pairs])
        found["us a step"] = cost([1e6 * concurrency * (1 / with_it - 1 / without) for with_it, without in pairs])
    return found


def gained(report: Report, point: str, figure: str) -> Cost:
    """In percent."""
    return cost([100 * (ratio - 1) for ratio in report.ratios(*TELEMETRY, point, figure)])


def measure_pairs(
    report: Report, options: argparse.Namespace, prepare: Callable[[ExitStack, tuple[str, ...]], Measure]
) -> None:
    """Fills the report, pair by pair; it is written after each, so that nothing is lost."""
    for pair in range(options.pairs):
        order = TELEMETRY[:: -1 if pair % 2 else 1]
        with ExitStack() as stack:
            measure = prepare(stack, order)
            for concurrency in options.concurrency:
                found = rounds(measure, options, pair, concurrency)
                kept = [
                    each
                    for each in found
                    if max(told.get(STOLEN, 0.0) for told in each.values()) <= STEAL_WARNS_PERCENT
                ]
                print(f"pair {pair + 1}, c={concurrency}, {told_of(found, kept)}", flush=True)
                for name in TELEMETRY:
                    report.at(name, f"c={concurrency}").add(figures_of(found, kept, name))
        for concurrency in options.concurrency:
            found = costs(report, f"c={concurrency}", concurrency)
            report.at(TELEMETRY[0], f"c={concurrency}").facts = {
                name: msgspec.to_builtins(c) for name, c in found.items()
            }
        if options.json is not None:
            write_report(report, options.json)


def figures_of(found: list[Round], kept: list[Round], name: str) -> dict[str, float]:
    """Of one pair: medians of the rounds that were kept, and of all rounds those that need or stand them."""
    medians = {
        figure: float(np.median([each[name][figure] for each in kept]))
        for figure in (kept[0][name] if kept else ())
        if figure not in (*OF_ALL_ROUNDS, STOLEN)
    }
    return medians | {
        figure: float(average([each[name][figure] for each in found]))
        for figure, average in OF_ALL_ROUNDS.items()
        if figure in found[0][name]
    }


def rounds(measure: Measure, options: argparse.Namespace, pair: int, concurrency: int) -> list[Round]:
    """Figures of each round by full or off, which go first in turns, with what was stolen where that is counted."""
    found = []
    for number in range(options.rounds):
        seed = 1000 * (options.rounds * pair + number + 1) + concurrency
        count = concurrency * options.requests_per_stream
        workload = streams(count, options.input_len, options.output_len, seed, VOCABULARY)
        found.append({})
        for name in TELEMETRY[:: -1 if (pair + number) % 2 else 1]:
            with stolen() as percent:
                figures = measure(name, workload, concurrency)
            if (steal := percent()) is not None:
                figures[STOLEN] = steal
            found[-1][name] = figures
    return found


def told_of(found: list[Round], kept: list[Round]) -> str:
    """`full 3,420.6, off 3,353.7 tokens/s, 12 of 20 rounds; of the others up to 23.7% was stolen`."""
    rates = [f"{name} {np.median([each[name][RATE] for each in kept or found]):,.1f}" for name in TELEMETRY]
    steal = max(figures.get(STOLEN, 0.0) for each in found for figures in each.values())
    others = f"; of the others up to {steal:.1f}% was stolen" if len(kept) < len(found) else ""
    return f"{', '.join(rates)} tokens/s, {len(kept)} of {len(found)} rounds{others}"


def measure_online(model: str, settings: dict, folder: Path, stack: ExitStack, order: tuple[str, ...]) -> Measure:
    """Both servers stand, and one of them works."""
    servers, client = {}, stack.enter_context(Client())
    for name in order:
        runs = Path(tempfile.mkdtemp(dir=folder)) if name == "full" else None
        servers[name] = our_server(name, model, settings | {"telemetry": name}, runs)
        stack.callback(servers[name].stop)
        servers[name].start()
        client.run(servers[name], streams(2, 64, 16, 0, VOCABULARY), 2, stream=True)

    def measure(name: str, workload: Workload, concurrency: int) -> dict[str, float]:
        before = servers[name].cpu_seconds()
        figures = client.run(servers[name], workload, concurrency, stream=True)["figures"]
        after, steps = servers[name].cpu_seconds(), sum(workload.output_lens) / concurrency
        for process, seconds in after.items():
            figures[f"{process}_cpu_us_per_step"] = 1e6 * (seconds - before[process]) / steps
        return figures

    return measure


def measure_offline(model: str, settings: dict, most: int, stack: ExitStack, order: tuple[str, ...]) -> Measure:
    engines = {}
    for name in order:
        engines[name] = ours(name, model, settings | {"telemetry": name, "max_num_seqs": most})
        stack.callback(engines[name].stop)
        engines[name].start()
        engines[name].run(streams(2, 64, 16, 0, VOCABULARY))

    def measure(name: str, workload: Workload, concurrency: int) -> dict[str, float]:
        run = engines[name].run(workload)
        return {"output_tokens_per_s": run.output_tokens / run.wall_ns * 1e9, "wall_s": run.wall_ns / 1e9}

    return measure


def table(report: Report, concurrency: list[int]) -> Table:
    shown = Table(title=f"{report.title}: full over off, medians of pairs with 95 % intervals")
    gains = ("tokens/s lost, %", "p50 ITL gained, %", "p99 ITL gained, %")
    told = (*gains, "us a step", "front, us a step", "core, us a step")
    for column in ("", "tokens/s off", "pairs", *told):
        shown.add_column(column, justify="right")
    for streams_at_once in concurrency:
        point = f"c={streams_at_once}"
        found = costs(report, point, streams_at_once)
        cells = [f"{c.median:+.2f} ({c.low:+.2f} to {c.high:+.2f})" if (c := found.get(name)) else "-" for name in told]
        off = report.at("off", point)
        rate, pairs = off.median(RATE), len(off.figures.get(RATE, []))
        shown.add_row(point, "-" if rate is None else f"{rate:,.1f}", str(pairs), *cells)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="CHECKPOINT", help="a checkpoint, or a shape such as 100m")
    parser.add_argument("-c", "--concurrency", type=int, action="append", help="repeatable; 1, 8 and 32 by default")
    parser.add_argument("--pairs", type=int, default=6, help="of servers")
    parser.add_argument("--rounds", type=int, default=20, help="of loads, on each pair")
    parser.add_argument("--offline", action="store_true", help="in the engine's own process, without a server")
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--requests-per-stream", type=int, default=4)
    parser.add_argument("--threads", type=int, default=0, help="of the model; 0 is one for each core")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.concurrency = options.concurrency or [1, 8, 32]
    if min(options.pairs, options.rounds, *options.concurrency) < 1:
        given = f"--pairs {options.pairs}, --rounds {options.rounds} and -c {options.concurrency}"
        raise BenchError(f"{given} must be at least 1")
    way = "offline" if options.offline else "streamed over HTTP"
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
        report = new_report("overhead", f"{Path(model).name}, {way}, {options.input_len} in, {options.output_len} out")
        report.command = " ".join(["python -m tests.bench.overhead", *sys.argv[1:]])
        if options.offline:
            prepare = partial(measure_offline, model, settings, max(options.concurrency))
        else:
            prepare = partial(measure_online, model, settings, Path(scratch))
        measure_pairs(report, options, prepare)
        Console(width=190).print(table(report, options.concurrency))


if __name__ == "__main__":
    try:
        main()
    except BenchError as error:
        sys.exit(f"overhead: {error}")
