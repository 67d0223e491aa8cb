"""What ended of a running load, a JSON line per second, for Locust's page:

    python -m sojourn.loadgen.record.live_events RUN_DIR

A process of its own, so that reading replies takes no time of the one that sends. It ends with its parent.
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from sojourn.loadgen.record.live_table import LiveReader
from sojourn.loadgen.target.processes import end_with
from sojourn.metrics.records.tables import SCHEMAS
from sojourn.metrics.request.goodput import judged
from sojourn.metrics.request.latencies import itl_ms
from sojourn.metrics.run.directory import with_latencies

SECONDS = 1.0
MOST_GAPS = 200  # of a class in one line; of more, evenly spaced ones in order of size


def lines(run_dir: Path, objectives: list[dict]):
    """Class → its requests since the last line: counts, and samples of each latency in ms. Endless."""
    reader = LiveReader(run_dir)
    while True:
        time.sleep(SECONDS)
        try:
            ended = [row for request, row in reader.ended() if not request.prelude]
        except (OSError, pa.ArrowException):  # a segment that goes away under us: the run is over
            ended = []
        if ended:
            frame = judged(with_latencies(pd.DataFrame(ended, columns=SCHEMAS["client"].names)), objectives)
            yield {klass: of_class(rows) for klass, rows in frame.groupby("klass")}


def of_class(rows: pd.DataFrame) -> dict:
    served = rows[rows.status == "ok"]
    gaps = [itl_ms(stamps, tokens) for stamps, tokens in zip(served.chunk_ns, served.chunk_tokens, strict=True)]
    all_gaps = np.sort(np.concatenate([np.zeros(0), *gaps]))
    if len(all_gaps) > MOST_GAPS:
        all_gaps = np.quantile(all_gaps, np.linspace(0, 1, MOST_GAPS))
    return {
        "ended": len(rows), "good": int(rows.good.sum()), "failed": len(rows) - len(served),
        "tokens": int(served.output_tokens.fillna(0).sum()), "TTFT": served.ttft_ms.dropna().tolist(),
        "TPOT": served.tpot_ms.dropna().tolist(), "ITL": all_gaps.tolist(),
    }  # fmt: skip


def main() -> None:
    end_with(os.getppid())
    os.nice(10)
    objectives = json.loads(sys.argv[2])
    for line in lines(Path(sys.argv[1]), objectives):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
