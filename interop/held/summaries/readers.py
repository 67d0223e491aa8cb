"""The readers of benchmark summaries."""

from sojourn.interop.held.held import Reader
from sojourn.interop.held.summaries import (
    aiperf,
    bench_serving,
    guidellm,
    guidellm_tables,
    inference_perf,
    llmd,
    offline,
    ollama,
    web,
)

SUMMARY_READERS: tuple[Reader, ...] = (
    llmd.REPORT, inference_perf.REQUESTS, inference_perf.REPORT, guidellm.REPORT, guidellm.CSV, aiperf.LINES,
    aiperf.JSON,
    aiperf.CSV, bench_serving.JSON, offline.JSON, ollama.JSON, *web.READERS[:-1], bench_serving.TABLE,
    guidellm_tables.TABLES, offline.PRINTED, ollama.PRINTED_READER, web.READERS[-1],
)  # fmt: skip
