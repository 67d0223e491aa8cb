"""Seconds that the app takes for each page of a long run: `python -m bench.ui.page_times --requests 10000`.

The run is read once: its requests first, its steps while the first page is read. Then each page is opened for the first
time, opened again, and opened with a filter. The time is that of the page's script with its figures as JSON; what the
browser takes to draw them is not in it.
"""

import argparse
import json
import resource
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from streamlit.testing.v1 import AppTest

from bench.ui.long_run import long_run, median_ms, rows_of
from sojourn.ui.launch import APP, PAGES
from sojourn.ui.page import read
from sojourn.ui.run_data import fingerprint

SKIPPED = ("fleet", "start")  # of several servers; of no run


def page_times(runs: Path, run: str, pages: list[str], repeats: int) -> dict[str, dict[str, float]]:
    sys.argv = ["app.py", "--runs", str(runs), "--run", run]
    found = {}
    for name in pages:
        app = AppTest.from_file(str(APP), default_timeout=600)
        app.query_params["run"] = run
        app.switch_page(f"views/{name}.py")
        first, first_cpu = _seconds(app)
        again = [_seconds(app)[0] for _ in range(repeats)]
        app.query_params["class"] = "chat"
        filtered, filtered_cpu = _seconds(app)
        found[name] = {
            "first": first, "again": median_ms(again) / 1e3, "filtered": filtered, "first_cpu": first_cpu,
            "filtered_cpu": filtered_cpu,
        }  # fmt: skip
        if app.exception:
            raise SystemExit(f"{name}: {app.exception[0].value}")
        print(
            f"{name:12} first {first:6.2f} s ({first_cpu:5.2f} s of CPU)   again {found[name]['again']:6.2f} s   "
            f"filtered {filtered:6.2f} s ({filtered_cpu:5.2f} s of CPU)"
        )
    return found


def _seconds(app: AppTest) -> tuple[float, float]:
    """Of the clock, and of the CPU: what a busy machine adds is in the first one only."""
    begin, cpu = time.perf_counter(), time.process_time()
    app.run()
    return time.perf_counter() - begin, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--pages", default=",".join(name for name in PAGES if name not in SKIPPED))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--runs", type=Path, help="folder to keep the run in, and to take it from")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    with TemporaryDirectory() as scratch:
        runs = options.runs or Path(scratch)
        for name, requests in (("long", options.requests), ("other", min(options.requests, 10_000))):
            if not (runs / name / "run.json").exists():
                long_run(runs / name, requests)
        path = runs / "long"
        begin = time.perf_counter()
        read(str(path), fingerprint(path))
        reading = time.perf_counter() - begin
        run = read(str(path), fingerprint(path))
        run.open_steps()
        run.open_book()
        whole = time.perf_counter() - begin
        print(f"{rows_of(run)}; read in {reading:.1f} s, with steps and who delayed whom in {whole:.1f} s")
        found = page_times(runs, "long", options.pages.split(","), options.repeats)
        peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"peak memory {peak_gib:.1f} GiB")
        if options.output:
            document = {
                "requests": options.requests,
                "read_s": reading,
                "whole_s": whole,
                "pages": found,
                "peak_gib": peak_gib,
            }
            options.output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
