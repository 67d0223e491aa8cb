"""The contract of evidence: what a reader takes from a file, and how a reader is declared.

A reader makes nothing up. A figure that the file does not prove is refused, and what a file cannot show stands in
`missing` as a sentence.
"""

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from sojourn.interop.held.given import Given
from sojourn.interop.imported.result import Imported

Server = Literal["vllm", "sglang", "llama.cpp", "tensorrt-llm", "tgi", "dynamo", "ray", "triton", "lmdeploy", "litellm",
                 "ollama", "sojourn"]  # fmt: skip
Setting = str | int | float | bool
EventKind = Literal["preemption", "traceback", "out of memory", "restart", "throttle", "compilation",
                    "late compilation", "refused", "hang", "death", "warning", "error"]  # fmt: skip


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One number of a benchmark's summary."""

    name: str  # in our terms, unit included: ttft_ms, tpot_ms, itl_ms, e2e_ms, output_tokens_per_s, failed
    statistic: str  # mean, median, p90, min, max, std; total, of a whole run; rate, per second; share, 0 to 1
    value: float
    unit: str  # ms, s, tokens/s, requests/s, tokens, requests, share
    clock: str  # whose clock, from where to where: "client: HTTP send to first non-empty chunk"
    theirs: str = ""  # how the file names it


class BenchmarkFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The summary of one benchmark: one load against one server."""

    tool: str  # "vllm bench serve", "GuideLLM", ...
    figures: list[Figure]
    version: str | None = None
    label: str = ""  # which of several in the file: "stage 2", "concurrent 16"
    load: dict[str, Setting] = {}  # as the file says: request_rate, max_concurrency, process

    def value(self, name: str, statistic: str = "mean") -> float | None:
        """None where the file does not say it."""
        found = (each.value for each in self.figures if each.name == name and each.statistic == statistic)
        return next(found, None)


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that a log line says happened."""

    kind: EventKind
    sentence: str
    line: int  # counted from 1
    ns: int | None = None  # of the wall clock, since 1970; None where the line has no moment
    times: int = 1  # how many lines say the same


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What a sensor showed."""

    device: str  # "GPU 0", "CPU"
    name: str  # sm_activity, memory_bandwidth, sm_clock, power, temperature, throttle, pcie_rx, memory_used
    unit: str
    value: float
    ns: int | None = None


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of evidence. A file may hold several: the benchmarks of a sweep, the stages of a load."""

    kind: str  # "vLLM log", "summary of GuideLLM", "page of /metrics"
    name: str  # as the user gave it
    server: Server | None = None
    version: str | None = None  # of the server, if it is stated
    settings: dict[str, Setting] = {}  # of the server, as stated: name → value
    engine_pid: int | None = None  # of the only process that computes, as its lines state it
    figures: BenchmarkFigures | None = None
    # Rows of the table `scrapes` (`ns, name, labels, value`), under names that `interop.sources` knows. `ns` is of the
    # wall clock, or counted from the first row where `is_wall_clock` is False.
    series: list[dict[str, Any]] = []
    is_wall_clock: bool = True
    events: list[Event] = []
    sensors: list[Reading] = []
    requests: Imported | None = None  # a file with a row a request goes on as a run
    notes: list[str] = []  # sentences: what a reader of the figures must know
    missing: list[str] = []  # sentences: what this evidence cannot show


class Reader(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of evidence. `recognises` is quick and never raises. `read` may raise InputError with a sentence that
    says what to give instead, and (AttributeError, KeyError, IndexError, TypeError, ValueError) for a damaged file."""

    kind: str  # as docs name it
    shows: str  # what can be concluded from it, for docs/triage.md
    recognises: Callable[[Given], bool]
    read: Callable[[Given], list[Held]]
    shares_text: bool = False  # it reads a part of a text, such as a table: others may read the rest
