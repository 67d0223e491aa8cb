"""Results of `vllm bench serve` and of SGLang's `bench_serving`, with and without a row per request; rows of
InferenceX, whose client is a fork of vLLM's; and the tables that these print."""

import re
from typing import Any

import msgspec

from sojourn.interop.held.given import Given
from sojourn.interop.held.held import BenchmarkFigures, Held, Reader, Server
from sojourn.interop.held.literals import found_in
from sojourn.interop.held.summaries.figures import figures_of, load_of, prove, statistic_of
from sojourn.interop.imported import vllm
from sojourn.interop.imported.result import Imported, Json, checked, count, inner, number, word
from sojourn.metrics.errors import InputError

VLLM, SGLANG, INFERENCEX = "vllm bench serve", "SGLang bench_serving", "InferenceX"
CLOCKS = {
    "ttft_ms": "client: before the HTTP request to the first chunk with a choice",
    "tpot_ms": "client: first to last chunk, by output tokens - 1; one value a request",
    "itl_ms": "client: between two chunks, all requests together; a chunk may hold several tokens",
    "e2e_ms": "client: before the HTTP request to the last chunk; waiting for a slot of --max-concurrency is outside",
    "requests_per_s": "client: requests that succeeded, over the whole duration, ramps included",
    "tokens_per_s_per_user": "client: 1 by the TPOT of the same statistic, so p99 is the slow end (intvty)",
    "output_tokens_per_s": "client: output tokens over the whole duration, ramps included",
}  # fmt: skip
LATENCIES = {"ttft": "ttft_ms", "tpot": "tpot_ms", "itl": "itl_ms", "e2el": "e2e_ms", "e2e_latency": "e2e_ms",
             "e2e": "e2e_ms"}  # fmt: skip
LATENCY = re.compile(r"(mean|median|std|avg|min|max|p\d+(?:\.\d+)?)_(ttft|tpot|itl|e2el|e2e_latency|e2e)(_ms|_s)?")
USER = re.compile(r"(mean|median|p\d+(?:\.\d+)?)_intvty")
# Their names → ours, statistic.
TOTALS = {
    "completed": ("succeeded", "total"), "failed": ("failed", "total"), "num_prompts": ("requests", "total"),
    "duration": ("duration_s", "total"), "total_input_tokens": ("input_tokens", "total"),
    "total_output_tokens": ("output_tokens", "total"), "request_throughput": ("requests_per_s", "rate"),
    "request_goodput": ("good_requests_per_s", "rate"), "request_goodput:": ("good_requests_per_s", "rate"),
    "input_throughput": ("input_tokens_per_s", "rate"), "output_throughput": ("output_tokens_per_s", "rate"),
    "total_token_throughput": ("total_tokens_per_s", "rate"), "total_throughput": ("total_tokens_per_s", "rate"),
    "max_output_tokens_per_s": ("output_tokens_per_s", "max"), "concurrency": ("in_flight", "mean"),
    "max_concurrent_requests": ("in_flight", "max"), "accept_length": ("accepted_tokens_per_step", "mean"),
    "tput_per_gpu": ("total_tokens_per_s_per_gpu", "rate"),
    "output_tput_per_gpu": ("output_tokens_per_s_per_gpu", "rate"),
    "osl": ("output_tokens", "mean"), "isl": ("input_tokens", "mean"),
}  # fmt: skip
NOT_SHOWN = ["when each request was sent, and how each one went: only percentiles are in the file",
             "how late the client sent: latencies begin when it did send",
             "anything of the server's own clock: its queue, KV cache and batch"]  # fmt: skip
TITLE = re.compile(r"=+ ?Serving Benchmark Result ?=+")
ROW = re.compile(r"(?P<label>[A-Z][\w ().,/%-]*?): +(?P<value>\S.*?)\s*")
LABELS = {
    "successful requests": "completed", "failed requests": "failed", "benchmark duration (s)": "duration",
    "total input tokens": "total_input_tokens", "total generated tokens": "total_output_tokens",
    "request throughput (req/s)": "request_throughput", "request goodput (req/s)": "request_goodput",
    "input token throughput (tok/s)": "input_throughput", "output token throughput (tok/s)": "output_throughput",
    "total token throughput (tok/s)": "total_token_throughput", "concurrency": "concurrency",
    "accept length": "accept_length", "peak output token throughput (tok/s)": "max_output_tokens_per_s",
    "peak concurrent requests": "max_concurrent_requests", "maximum request concurrency": "max_concurrency",
    "max request concurrency": "max_concurrency", "request rate configured (rps)": "request_rate",
    "max reqeuest concurrency": "max_concurrency", "traffic request rate": "request_rate",
    "total throughput (tok/s)": "total_throughput", "backend": "backend",
}  # fmt: skip
PRINTED = re.compile(r"(mean|median|std|p\d+(?:\.\d+)?) (ttft|tpot|itl|e2el|e2e latency) \((ms|s)\)")


def _documents(given: Given) -> list[Json]:
    return [each for each in given.documents if _is_summary(each)]


def _is_summary(document: Any) -> bool:
    return isinstance(document, dict) and sum(LATENCY.fullmatch(str(name)) is not None for name in document) >= 2


def read_json(given: Given) -> list[Held]:
    """One a document: with `--append-result`, and of SGLang, a file holds one a line."""
    found = []
    for each in given.documents:
        if not _is_summary(each):
            raise InputError("not every line is a result of one tool; give them one by one")
        found.append(_held(given.name, each, _requests(each)))
    return found


def _requests(document: Json) -> Imported | None:
    """The rows, where the file has them and they can be read."""
    try:
        return checked(vllm.read(document)[0]) if vllm.recognises(document) else None
    except InputError:
        return None


def _tool(document: Json) -> str:
    if "tput_per_gpu" in document:
        return INFERENCEX
    told = {"median_e2e_latency_ms", "mean_e2e_latency_ms", "total_output_tokens_retokenized", "sharegpt_output_len"}
    return SGLANG if told & set(document) else VLLM


def _held(name: str, document: Json, requests: Imported | None = None) -> Held:
    tool, told, named = _tool(document), {}, True
    for key, value in document.items():
        if (found := LATENCY.fullmatch(key)) is not None:
            statistic, latency, unit = found.groups()
            named &= unit is not None
            told[LATENCIES[latency], statistic_of(statistic) or statistic] = value, 1.0 if unit == "_ms" else 1e3, key
        elif (found := USER.fullmatch(key)) is not None:
            told["tokens_per_s_per_user", statistic_of(found[1]) or found[1]] = value, 1.0, key
        elif key in TOTALS and TOTALS[key] not in told:
            told[TOTALS[key]] = value, 1.0, key
    if tool == INFERENCEX:  # lengths are nominal there
        told.pop(("requests", "total"), None)
    figures = BenchmarkFigures(
        tool=tool, version=word(document.get("vllm_version")), figures=figures_of(CLOCKS, told), label=_label(document),
        load=load_of(
            request_rate=document.get("request_rate"), burstiness=document.get("burstiness"),
            max_concurrency=count(document.get("max_concurrency", document.get("conc"))),
        ),
    )  # fmt: skip
    notes = prove(figures, by_name=named)
    server, version = _server(document)
    return Held(
        kind=f"result of {tool}", name=name, server=server, version=version, settings=_settings(document),
        figures=figures, requests=requests, notes=notes, missing=[] if requests is not None else NOT_SHOWN,
    )  # fmt: skip


def _label(document: Json) -> str:
    limit, rate = document.get("max_concurrency", document.get("conc")), document.get("request_rate")
    if number(limit):
        return f"concurrency {limit}"
    return f"{rate:g} requests/s" if number(rate) is not None and rate != "inf" else ""


def _server(document: Json) -> tuple[Server | None, str | None]:
    stated = str(document.get("framework") or document.get("backend") or "").lower()
    image = word(document.get("image")) or ""
    version = image.rpartition(":")[2] if ":" in image else None
    names: tuple[Server, ...] = ("vllm", "sglang")
    found = next((each for each in names if stated.startswith(each) or f"{each}/" in image), None)
    return ("tensorrt-llm" if stated.startswith("trt") else found), version


def _settings(document: Json) -> dict[str, Any]:
    names = {
        "model_id": "model",
        "model": "model",
        "tp": "tensor_parallel_size",
        "precision": "quantization",
        "spec_decoding": "speculative",
        "hw": "hardware",
        "dp_attention": "dp_attention",
        "ep": "expert_parallel",
    }
    return {
        ours: document[theirs] for theirs, ours in names.items() if inner(document, theirs) not in (None, "", "none")
    }


def read_tables(given: Given) -> list[Held]:
    """Each table of the text."""
    found: list[Held] = []
    rows: Json | None = None
    for text in [*(line.text.strip() for line in given.lines), ""]:
        if rows is not None and (row := ROW.fullmatch(text)) is not None:
            _add_row(rows, row["label"].lower().strip(), row["value"])
        elif rows is not None and not re.fullmatch(r"-+[^-].*[^-]-+", text):
            held = _held(given.name, rows)
            note = [] if re.fullmatch("=+", text) else ["the last line of the table is missing, and so may be others"]
            found.append(msgspec.structs.replace(held, notes=[*note, *held.notes]))
            rows = None
        if TITLE.fullmatch(text):
            rows = {}
    return found


def _add_row(rows: Json, label: str, value: str) -> None:
    if (printed := PRINTED.fullmatch(label)) is not None:
        rows[f"{printed[1]}_{printed[2].replace(' ', '_')}_{printed[3]}"] = number(value)
    elif label in LABELS:
        shown = number(value)
        rows[LABELS[label]] = value if shown is None else shown


JSON = Reader(
    kind="results of `vllm bench serve`, SGLang's `bench_serving` and InferenceX (JSON, JSONL)",
    shows="percentiles at the client, rates, failures; with a row for each request (`--save-detailed`) a whole run",
    recognises=lambda given: bool(_documents(given)), read=read_json,
)  # fmt: skip
TABLE = Reader(
    kind="the table that `vllm bench serve` and SGLang's `bench_serving` print",
    shows="as the JSON without rows", recognises=lambda given: found_in(TITLE, given.plain), read=read_tables,
    shares_text=True,
)  # fmt: skip
