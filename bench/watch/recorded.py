"""What a watch would have said of recorded scrapes: `python -m bench.watch.recorded FOLDER` of bench.probe.cases.

Each run's scrapes are judged one by one, as `sojourn watch` does it live, without objectives and with those of the run.
"""

import argparse
from pathlib import Path
from typing import Any

from metrics.live.observer import Observer
from metrics.live.steady import Steady
from metrics.run.directory import RunDirectory
from metrics.sources.scrapes import UP


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="run directories with scrapes.parquet")
    runs = [RunDirectory(path.parent) for path in sorted(parser.parse_args().folder.glob("*/scrapes.parquet"))]
    print("| case | seconds | `/metrics` | `/metrics` and `--slo` |", "|---" * 4 + "|", sep="\n")
    for run in runs:
        without, _ = said(run, {})
        with_slo, seconds = said(run, _bounds(run))
        print(f"| {run.name} | {seconds:.0f} | {without} | {with_slo} |")


def said(run: RunDirectory, bounds: dict[str, float]) -> tuple[str, float]:
    """What was said, with the seconds since the first request ran, and how many seconds there are."""
    observer, steady, changes, came_ns, last_ns = Observer("", run.name, bounds), Steady(), [], None, 0
    for ns, rows in _scrapes(run):
        if all(row["name"] == UP for row in rows):
            observer.add_failure(ns, "a scrape failed")
            continue
        observer.add(ns, rows)
        came_ns = ns if came_ns is None and observer.history[-1].running else came_ns
        shown, new = steady.take(ns, observer.watched())
        for change in new:
            after_s = (ns - (came_ns or ns)) / 1e9
            key = f"`{shown.findings[0].key}`" if shown.findings else change.state
            changes.append(f"{key} in {after_s:.0f} s")
        last_ns = ns
    alarms = [each for each in changes if not each.startswith(("healthy", "idle"))]
    return ", then ".join(alarms) or "silent", (last_ns - (came_ns or last_ns)) / 1e9


def _scrapes(run: RunDirectory) -> list[tuple[int, list[dict[str, Any]]]]:
    return [
        (int(ns), [{"ns": int(ns), "name": name, "labels": list(labels.items()), "value": value}
                   for name, labels, value in zip(group["name"], group["labels"], group["value"], strict=True)])
        for ns, group in run.table("scrapes").groupby("ns")
    ]  # fmt: skip


def _bounds(run: RunDirectory) -> dict[str, float]:
    first = (run.meta()["objectives"] or [{}])[0]
    return {name: float(bound) for name, bound in first.items() if name.endswith("_ms") and bound is not None}


if __name__ == "__main__":
    main()
