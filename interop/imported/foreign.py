"""What a file is that is no result of requests, and what to give instead: one sentence for each known kind."""

import csv
import re
from collections.abc import Callable
from typing import Any

from sojourn.interop.imported.result import inner, number

WANTED = (
    "vllm bench serve's JSON of --save-result --save-detailed, GuideLLM's JSON, AIPerf's profile_export.jsonl, or "
    "inference-perf's per_request_lifecycle_metrics.json"
)
PACKED = {
    b"\x1f\x8b": "is compressed by gzip; unpack it first: gunzip -k FILE",
    b"PK\x03\x04": "is a zip archive; unpack it first",
    b"\x28\xb5\x2f\xfd": "is compressed by zstd; unpack it first: unzstd FILE",
    b"BZh": "is compressed by bzip2; unpack it first: bunzip2 -k FILE",
    b"\xfd7zXZ": "is compressed by xz; unpack it first: unxz -k FILE",
    b"PAR1": "is a Parquet file; give the JSON that the tool writes",
    b"SQLite format 3": "is a database of SQLite; give the JSON that the tool writes",
}
SUMMARY = re.compile(
    r"^((mean|median|avg|std|min|max|p\d+(\.\d+)?)_(ttft|tpot|itl|e2el?|intvty)|(ttft|tpot|itl|e2el?)_)"
)
LOG = re.compile(r"\b(DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL)\b|^\[?\d{4}-\d\d-\d\d[ T]\d\d:\d\d|^Traceback ")
YAML = re.compile(r"^(---\s*$|[\w.-]+:(\s|$)|- )")
FIRST_LINES = 20


def packed(content: bytes) -> str | None:
    """What a file of bytes is, where it is packed."""
    return next((says for begin, says in PACKED.items() if content.startswith(begin)), None)


def _has(*names: str) -> Callable[[dict[str, Any]], bool]:
    return lambda document: set(names) <= set(document)


def _is_aiperf_summary(document: dict[str, Any]) -> bool:
    return any(isinstance(each, dict) and {"unit", "avg"} <= set(each) for each in document.values())


# Whether a document, or the first one of a list, is of the kind; what it is; what to give instead.
KINDS: tuple[tuple[Callable[[dict[str, Any]], bool], str, str], ...] = (
    (_has("load_summary", "successes"), "is a summary of inference-perf, of a run or of one stage, without requests",
     "give per_request_lifecycle_metrics.json, which report.request_lifecycle.per_request: true writes"),
    (_is_aiperf_summary, "is a summary of AIPerf (profile_export_aiperf.json), without requests",
     "give profile_export.jsonl of the same folder"),
    (_has("experiments"), "is a profile of genai-perf, which AIPerf has replaced",
     "measure with AIPerf, and give its profile_export.jsonl"),
    (_has("tput_per_gpu"), "is a row of InferenceX: throughput and percentiles of one setting, without requests",
     "give the file of vllm bench serve --save-result --save-detailed behind it"),
    (_has("requests", "block_size"), "is a trace of kv-cache-tester: requests to send, and no result of sending them",
     "measure first; Sojourn replays traces of Mooncake's form, see `sojourn lint`"),
    (_has("timestamp", "input_length"), "is a trace: requests to send, and no result of sending them",
     "name it in arrivals.file of a scenario, and run `sojourn load`"),
    (_has("conversations"), "is a data set of conversations, and no result of sending them",
     "name it in from_file of a class, and run `sojourn load`"),
    (_has("resourceSpans"), "holds spans of OpenTelemetry", "join them to a run with `sojourn join`"),
    (_has("status", "data"), "is an answer of Prometheus, which has no requests",
     "ask the server itself with `sojourn watch`"),
    (lambda document: any(SUMMARY.match(str(name)) for name in document),
     "is a summary of a benchmark: percentiles, without requests", f"give the file with a row a request: {WANTED}"),
)  # fmt: skip


def kind_of(document: Any) -> tuple[str, str] | None:
    """What a JSON document is, and what to give instead; None for one of no known kind."""
    first = document[0] if isinstance(document, list) and document else document
    if not isinstance(first, dict):
        return None
    return next(((what, instead) for is_kind, what, instead in KINDS if is_kind(first)), None)


def foreign(document: Any) -> str:
    """What a JSON document of no known tool is."""
    first = document[0] if isinstance(document, list) and document else document
    if (kind := kind_of(document)) is not None:
        return f"{kind[0]}; {kind[1]}{_late_client(first)}"
    shown = f" (its keys: {', '.join(map(str, list(first)[:6]))})" if isinstance(first, dict) and first else ""
    return f"is no result file that is known here{shown}; give {WANTED}"


def _late_client(summary: dict[str, Any]) -> str:
    """What inference-perf's summary says of its own client, which no figure of the server shows."""
    delay = number(inner(summary, "load_summary", "schedule_delay", "mean"))
    return "" if delay is None else f". It says that its client sent {delay:.3g} s late on average"


def foreign_text(text: str, error: Exception) -> str:
    """What a text is that is not JSON."""
    lines = [line for line in text.splitlines() if line.strip()][:FIRST_LINES]
    first = lines[0].strip()
    if first[:1] in "{[" and not LOG.search(first):
        cut = text.rstrip()[-1:] not in "}]"
        return f"is not JSON: {error}" + ("; its end is missing, so it was cut off: copy it again, or measure again"
                                          if cut else "")  # fmt: skip
    if first.startswith("<"):
        return f"is a page in HTML or XML, which holds figures to look at; give {WANTED}"
    if sum(bool(LOG.search(line)) for line in lines) * 2 >= len(lines):
        return f"is a log, without a row a request; give {WANTED}. For a running server see `sojourn watch`"
    if first.startswith("# HELP") or first.startswith("# TYPE"):
        return "is a page of /metrics, which has no requests; ask the running server with `sojourn watch`"
    if sum(bool(YAML.match(line.strip())) for line in lines) * 2 >= len(lines):
        return f"is YAML; write the result as JSON (GuideLLM: --output kind=json), or give {WANTED}"
    cells = next(csv.reader([first]), [])
    if len(cells) > 1:
        rows = "" if len(lines) > 1 else ", with a header and no row"
        return f"is CSV{rows} (its first cell is {cells[0][:40]!r}); give the tool's JSON: {WANTED}"
    return f"is not JSON: {error}; give {WANTED}"
