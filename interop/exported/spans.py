"""One ended request as spans: what a trace shows is its record, placed in time. Pure; knows no exporter.

The root lasts from the request's arrival to its last byte. Below it stand the accounts of the ledger in the order of
the critical path to that byte, those of the core once up to the first token and again from there to the last one. (The
path to the first text has a ledger of its own: `sojourn.ttft.*`.)

A ledger holds durations, not moments: a span begins at a moment that was measured where the record has one (arrival,
end of encoding, first scheduled, last token), and else where the span before it ended. `sojourn.begins` says which.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sojourn.interop.exported.request_outcome import outcome
from sojourn.metrics.ledger import ACCOUNTS, Account
from sojourn.metrics.records import RequestRecord

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
LATENCY = "gen_ai.latency."  # seconds; keys that vLLM and SGLang share
_LOW_64_BITS = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Parent:
    """The caller's span, as a `traceparent` header names it."""

    trace_id: int
    span_id: int
    is_sampled: bool


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of a request. Nanoseconds of the monotonic clock."""

    name: str
    begin_ns: int
    end_ns: int
    attributes: dict[str, Any]


def parent_of(traceparent: str | None) -> Parent | None:
    """The parent that a header of W3C Trace Context names; None for what is no such header."""
    found = _TRACEPARENT.fullmatch(traceparent or "")
    if found is None:
        return None
    trace_id, span_id, flags = (int(part, 16) for part in found.groups()[:3])
    return Parent(trace_id, span_id, bool(flags & 1)) if trace_id and span_id else None


def is_sampled(trace_id: int, ratio: float) -> bool:
    """The decision of OpenTelemetry's TraceIdRatioBased: all who see the trace id come to the same."""
    return trace_id & _LOW_64_BITS < round(ratio * (1 << 64))


_WAITING = (
    Account.REQUEST_ADMISSION, Account.MEMORY_ADAPTER_LOAD, Account.REQUEST_QUEUE, Account.MEMORY_BLOCKED,
)  # fmt: skip
_FRONT = (Account.TOKEN_DECODE, Account.REQUEST_STREAM)
_BEFORE = (
    Account.REQUEST_QUOTA, Account.REQUEST_COLD_START, Account.TOKEN_ENCODE, Account.REQUEST_MODERATION,
)  # fmt: skip
_OUTSIDE = (Account.CLIENT_LAG, Account.CLIENT_NETWORK, *_BEFORE, *_WAITING, *_FRONT)
_STEPS = tuple(account for account in Account if account not in _OUTSIDE)


def account_spans(request: RequestRecord) -> list[Span]:
    """One span an account that holds any time, in the order of the critical path."""
    ledger = request.ledger
    streamed = request.first_written_ns not in (None, request.written_ns)
    first = request.ttft if streamed else ledger
    rest = [whole - part for whole, part in zip(ledger, first, strict=True)]
    last_token_ns = request.token_ns[-1] if request.token_ns else None
    first_part = "to_first_token" if streamed else "to_last_token"
    groups = (
        (request.arrived_ns, _BEFORE, ledger, first_part),
        (request.encoded_ns, _WAITING, first, first_part),
        (request.scheduled_ns, _STEPS, first, first_part),
        (None, (*_WAITING, *_STEPS), rest, "to_last_token"),
        (last_token_ns, _FRONT, ledger, "to_last_byte"),
    )
    spans: list[Span] = []
    cursor_ns = request.arrived_ns
    for anchor_ns, accounts, booked, part in groups:
        begins = "end_to_end"
        if anchor_ns is not None:
            cursor_ns, begins = anchor_ns, "measured"
        for account in accounts:
            duration_ns = booked[account]
            if duration_ns <= 0:
                continue
            info = ACCOUNTS[account]
            attributes = {
                "sojourn.account": info.name,
                "sojourn.lifecycle": info.lifecycle,
                "sojourn.part": part,
                "sojourn.begins": begins,
            }
            spans.append(Span(info.name, cursor_ns, cursor_ns + duration_ns, attributes))
            cursor_ns, begins = cursor_ns + duration_ns, "end_to_end"
    return spans


def moments(request: RequestRecord) -> Iterator[tuple[str, int]]:
    """The moments that were measured between arrival and last byte, by name."""
    named = {
        "encoded": request.encoded_ns,
        "queued": request.queued_ns,
        "first_scheduled": request.scheduled_ns,
        "first_token": request.token_ns[0] if request.token_ns else None,
        "last_token": request.token_ns[-1] if request.token_ns else None,
        "first_written": request.first_written_ns,
    }
    return ((name, ns) for name, ns in named.items() if ns is not None)


def _latencies(request: RequestRecord) -> dict[str, int]:
    """Nanoseconds by the names that vLLM and SGLang give them on their spans. They overlap: `e2e` holds all others."""
    first_ns, last_ns = (request.token_ns[0], request.token_ns[-1]) if request.token_ns else (None, None)
    pairs = {
        "time_in_queue": (request.queued_ns, request.scheduled_ns),
        "time_to_first_token": (request.arrived_ns, first_ns),
        "time_in_model_prefill": (request.scheduled_ns, first_ns),
        "time_in_model_decode": (first_ns, last_ns),
        "time_in_model_inference": (request.scheduled_ns, last_ns),
        "e2e": (request.arrived_ns, request.written_ns or request.finished_ns),
    }
    return {name: end - begin for name, (begin, end) in pairs.items() if begin is not None and end is not None}


def root_span(request: RequestRecord, model_name: str, options: Mapping[str, Any]) -> Span:
    """The request itself, in the words of OpenTelemetry's GenAI conventions; our own are below `sojourn.`.

    `options`: attributes of the options of the request, `gen_ai.operation.name` among them.
    """
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "sojourn",
        "gen_ai.request.model": model_name,
        "gen_ai.response.model": model_name,
        "gen_ai.usage.input_tokens": request.prompt_tokens,
        "gen_ai.usage.output_tokens": request.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": request.cached_tokens,
        **options,
        "sojourn.request_id": request.request_id,
        "sojourn.outcome": outcome(request),
        "sojourn.preemptions": request.preemptions,
        "sojourn.recomputed_tokens": request.recomputed_tokens,
    }
    optional = {
        "gen_ai.response.finish_reasons": [request.finish_reason] if request.finish_reason else None,
        "error.type": "server_error" if request.error is not None else None,
        "sojourn.tenant": request.tenant or None,
        "sojourn.class": request.klass or None,
        "sojourn.step.first": request.first_step,
        "sojourn.step.last": request.last_step,
    }
    if request.first_written_ns is not None:
        ttft_ns = request.first_written_ns - request.arrived_ns
        optional["gen_ai.response.time_to_first_chunk"] = ttft_ns / 1e9
    optional |= {f"{LATENCY}{name}": ns / 1e9 for name, ns in _latencies(request).items()}
    attributes |= {name: value for name, value in optional.items() if value is not None}
    for name, ledger in (("ledger", request.ledger), ("ttft", request.ttft)):
        attributes |= {
            f"sojourn.{name}.{info.name}_ns": ledger[info.account] for info in ACCOUNTS if ledger[info.account]
        }
    attributes |= {f"sojourn.wait.{reason}_ns": waited_ns for reason, waited_ns in request.waits.items()}
    attributes |= {f"sojourn.prefix.{name}_tokens": tokens for name, tokens in request.prefix_outcomes.items()}
    name = f"{attributes['gen_ai.operation.name']} {model_name}"
    return Span(name, request.arrived_ns, request.written_ns or request.finished_ns, attributes)
