"""The result file of `vllm bench serve --save-result --save-detailed`, as vLLM since January 2026 writes it.

Arrays have one entry a request, in seconds: `start_times` of a monotonic clock, `ttfts` from the start, `itls` between
chunks. A request that failed has 0 and [] there, and not always an error. With `--append-result` the file holds one
document a line.
"""

from itertools import accumulate
from typing import Any

from sojourn.interop.imported.own_figures import check_own_figures
from sojourn.interop.imported.result import Imported, Json, count, ns, number, word
from sojourn.metrics.errors import InputError
from sojourn.metrics.records import ClientRecord

TOOL = "vllm bench serve"
ARRAYS = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "errors")
FIGURES = ("completed", "failed", "duration", "request_throughput", "output_throughput", "median_ttft_ms",
           "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms")  # fmt: skip
NO_WORD = "failed without a word: no token came"
# Of SGLang's objectives, which our export writes too, and one of ours
KEYS = {"ttft": "ttft_ms", "ttfa": "ttfa_ms", "tpot": "tpot_ms", "e2el": "e2e_ms"}


def recognises(document: Any) -> bool:
    """SGLang's `bench_serving` writes nearly the same."""
    return isinstance(document, dict) and {"backend", "request_throughput"} <= set(document)


def read(document: Json) -> list[Imported]:
    """Raises InputError where the arrays are missing, or are not of one length."""
    missing = [name for name in ARRAYS if not isinstance(document.get(name), list)]
    if missing == ["start_times"]:
        raise InputError(
            "the file says how long each request took, and not when it was sent: it has no start_times, which vLLM "
            f"writes since January 2026 and SGLang does not. Measure again with a newer vLLM{_own_figures(document)}"
        )
    if missing:
        raise InputError(
            f"the file has no {missing[0]}: it holds summaries only. Measure again with --save-result --save-detailed"
            f"{_own_figures(document)}"
        )
    lengths = {name: len(document[name]) for name in ARRAYS}
    if len(set(lengths.values())) > 1:
        raise InputError(f"the arrays of the file have different lengths: {lengths}; the file is damaged")
    latencies, queued = (_array(document, name, lengths["ttfts"]) for name in ("latencies", "queue_times"))
    unseen = [
        "the intended send of a request: latencies start at the actual send, so a late client is not seen",
        "tokens in each chunk: a chunk stands for a token in the times between tokens",
        "cached tokens, tenants, classes and sessions",
    ]
    if latencies is None:
        unseen.append("the last byte: the last chunk stands for it")
    rate, limit = document.get("request_rate"), count(document.get("max_concurrency"))
    if limit:
        arrivals: Json = {"process": "concurrency", "in_flight": limit}
    else:
        arrivals = {"process": "at_once"} if rate == "inf" else {"process": "poisson", "rate_rps": rate}
    bounds = document.get("goodput_slos_ms")
    objectives = {KEYS[name]: bound for name, bound in (bounds or {}).items() if name in KEYS}
    rows = [_row(document, place, latencies, queued) for place in range(lengths["ttfts"])]
    return [Imported(
        tool=TOOL, version=word(document.get("vllm_version")), name=word(document.get("label")) or "vllm-bench",
        model=word(document.get("model_id")), rows=rows, unseen=unseen, arrivals=arrivals,
        objectives=[{"klass": "all", "source": "the result file", **objectives}] if objectives else [],
        notes=_disagreement(document, rows) + check_own_figures(document, rows),
    )]  # fmt: skip


def _own_figures(document: Json) -> str:
    """What the file says of itself, for a reader who cannot measure again."""
    told = [f"{name} {document[name]:g}" for name in FIGURES if number(document.get(name)) is not None]
    return f". Its own figures: {', '.join(told)}" if told else ""


def _disagreement(document: Json, rows: list[ClientRecord]) -> list[str]:
    """A sentence where the file counts its failures otherwise than its requests do."""
    failed, completed = count(document.get("failed")), count(document.get("completed"))
    told = failed if failed is not None else None if completed is None else len(rows) - completed
    read = sum(row.status != "ok" for row in rows)
    if told is None or told == read:
        return []
    return [f"the file says that {told:,} requests failed, and its requests show {read:,}: trust neither before a look"]


def _array(document: Json, name: str, length: int) -> list[Any] | None:
    found = document.get(name)
    return found if isinstance(found, list) and len(found) == length else None


def _times(document: Json, place: int, *, served: bool) -> tuple[int, int | None, list[int]]:
    """Start, time to the first token, and times between tokens, in nanoseconds. Raises InputError for no times."""
    start, ttft = ns(document["start_times"][place]), ns(document["ttfts"][place])
    if start is None:
        raise InputError(f"start_times[{place}] is no number; the file is damaged")
    if served and (ttft is None or ttft < 0):
        raise InputError(f"ttfts[{place}] is {document['ttfts'][place]!r}, which is no time; the file is damaged")
    gaps = [ns(gap) for gap in document["itls"][place] or []]
    if None in gaps:
        raise InputError(f"itls[{place}] has an entry that is no number; the file is damaged")
    return start, ttft, gaps


def _row(document: Json, place: int, latencies: list[Any] | None, queued: list[Any] | None) -> ClientRecord:
    error = word(document["errors"][place])
    start, ttft, gaps = _times(document, place, served=not error)
    output = count(document["output_lens"][place])
    if not error and not ttft and not gaps and not output:
        error = NO_WORD  # vLLM keeps the reason of the status line, which HTTP/1.1 lets a server leave out
    first = start + ttft if ttft and not error else None  # 0 where no token came
    chunks = list(accumulate(gaps, initial=first)) if first is not None else []
    latency = ns(latencies[place]) if latencies is not None else None
    last = start + latency if latency else chunks[-1] if chunks else None
    return ClientRecord(
        request_id=f"vllm-{place:06d}", scenario="", due_ns=start - (ns(queued[place]) or 0 if queued else 0),
        sent_ns=start, first_token_ns=first, last_byte_ns=last, status="error" if error else "ok", error=error,
        prompt_tokens=count(document["input_lens"][place]), output_tokens=output,
        chunk_ns=chunks,
    )  # fmt: skip
