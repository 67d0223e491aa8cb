"""How well a replay predicts: each changed setting is predicted from a run without it, then run, and compared.

python -m bench.replay DIR [--repeats 2] [--workload NAME] [--markdown docs/results/replay_accuracy.md]
python -m bench.replay DIR --planted [--markdown docs/results/replay_accuracy.md]

Resumable: a run that DIR holds already is not made again. A run takes its scenario's 9 to 12 seconds and about 5 to
start and to end; all of them, twice, take about 18 minutes. Runs alternate between base and changes, so that a drift
of the machine spreads over both.

With --planted, DIR is a folder of `sojourn dev faults run`. A case whose fault is only settings, and its workload
without the fault, are such a pair, in both directions. No run is made.
"""

import argparse
import shutil
import sys
import time
from pathlib import Path

from bench.replay.compare import Compared, compare
from bench.replay.pairs import BASE, PAIRS, SCENARIOS, label
from bench.replay.planted import planted_pairs
from bench.replay.report import markdown, summary
from sojourn.loadgen.run.experiment import run_scenario
from sojourn.loadgen.run.run_files import is_whole
from sojourn.loadgen.scenario.scenario import load_scenario
from sojourn.metrics.run.directory import RunDirectory

SECONDS_A_RUN = 17


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", type=Path, help="folder of the runs; an earlier one is continued")
    options.add_argument("--repeats", type=int, default=2, help="runs of each setting")
    options.add_argument("--workload", action="append", choices=sorted(PAIRS), help="only this one; repeatable")
    options.add_argument("--markdown", type=Path, help="file to write the tables to")
    options.add_argument("--planted", action="store_true", help="DIR has cases of `sojourn dev faults run`: pair these")
    options.add_argument("--compare-only", action="store_true", help="make no run, use those that are there")
    chosen = options.parse_args()
    if chosen.planted and (chosen.workload or chosen.compare_only):
        options.error("--planted makes no run and compares every pair; leave --workload and --compare-only out")
    compared = _compared_cases(chosen.folder) if chosen.planted else _compared_workloads(chosen)
    if not compared:
        print("no pair has both of its runs", file=sys.stderr)
        return 1
    print(summary(compared))
    if chosen.markdown:
        command = "python -m bench.replay DIR " + ("--planted" if chosen.planted else f"--repeats {chosen.repeats}")
        chosen.markdown.write_text(markdown(compared, command), encoding="utf-8")
    return 0


def _compared_cases(folder: Path) -> list[Compared]:
    return [compare(*pair) for pair in planted_pairs(folder)]


def _compared_workloads(chosen: argparse.Namespace) -> list[Compared]:
    workloads = chosen.workload or list(PAIRS)
    if not chosen.compare_only:
        _measure(chosen.folder, workloads, chosen.repeats)
    return [each for name in workloads for each in _compared(chosen.folder, name, chosen.repeats)]


def _measure(folder: Path, workloads: list[str], repeats: int) -> None:
    wanted = [
        (name, settings, repeat)
        for name in workloads for repeat in range(repeats) for settings in (BASE, *PAIRS[name])
    ]  # fmt: skip
    missing = [each for each in wanted if not is_whole(_path(folder, *each))]
    print(
        f"{len(missing)} of {len(wanted)} runs to make, about {len(missing) * SECONDS_A_RUN / 60:.0f} min", flush=True
    )
    for place, (name, settings, repeat) in enumerate(missing):
        path = _path(folder, name, settings, repeat)
        shutil.rmtree(path, ignore_errors=True)  # what an interruption left
        begin = time.monotonic()
        scenario = load_scenario(str(SCENARIOS / f"{name}.yaml"))
        run_scenario(scenario, path, engine_overrides=settings | {"port": 0}, seed=None, processes=1)
        taken = time.monotonic() - begin
        print(f"{place + 1}/{len(missing)} {name} {label(settings)} #{repeat}: {taken:.0f} s", flush=True)


def _compared(folder: Path, name: str, repeats: int) -> list[Compared]:
    found = []
    for settings in PAIRS[name]:
        paths = [
            (_path(folder, name, BASE, repeat), _path(folder, name, settings, repeat)) for repeat in range(repeats)
        ]
        whole = [[RunDirectory(path) for path in both] for both in paths if all(map(is_whole, both))]
        if whole:
            bases, changed = zip(*whole, strict=True)
            found.append(compare(name, settings, bases, changed))
    return found


def _path(folder: Path, name: str, settings: dict, repeat: int) -> Path:
    return folder / name / f"{label(settings)}#{repeat}"


if __name__ == "__main__":
    sys.exit(main())
