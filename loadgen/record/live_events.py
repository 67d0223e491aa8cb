"""What ended of a running load, a JSON line per second, for Locust's page:

    python -m sojourn.loadgen.record.live_events RUN_DIR OBJECTIVES

A process of its own, so that reading replies takes no time of the one that sends. It ends with its parent.
"""

import json
import os
import sys
import time
from collections import Counter
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
DIGITS = 3  # of a latency in ms


def lines(run_dir: Path, objectives: list[dict]):
    """Class → its requests since the last line: counts, and of each latency [ms, number of samples]. Endless."""
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
    return {
        "ended": len(rows), "good": int(rows.good.sum()), "failed": len(rows) - len(served),
        "tokens": int(served.output_tokens.fillna(0).sum()), "TTFT": counted(served.ttft_ms),
        "TPOT": counted(served.tpot_ms), "ITL": counted(np.concatenate([np.zeros(0), *gaps])),
    }  # fmt: skip


def counted(values_ms: np.ndarray | pd.Series) -> list[tuple[float, int]]:
    """Values of DIGITS significant digits, and how many samples have each: bounded, and every sample counts."""
    values = np.asarray(values_ms, dtype=float)
    values = np.maximum(values[np.isfinite(values)], 1e-3)
    scale = 10.0 ** (DIGITS - 1 - np.floor(np.log10(values)))
    return list(Counter((np.round(values * scale) / scale).round(6).tolist()).items())


def main() -> None:
    end_with(os.getppid())
    os.nice(10)
    objectives = json.loads(sys.argv[2])
    for line in lines(Path(sys.argv[1]), objectives):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
