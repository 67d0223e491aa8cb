"""Spans of a file: OTLP as JSON (one message, or one a line) or as protobuf, as a collector's file exporter writes it,
or JSON with one list of plain `spans`.

The collector's protobuf format puts the length of each message before it, as four bytes, big-endian. A single message
without a length, as an exporter posts it, is read, too. https://opentelemetry.io/docs/specs/otel/protocol/file-exporter
"""

import base64
import json
import struct
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from sojourn.metrics.errors import InputError
from sojourn.metrics.installed import PackageMissing, say_missing

LARGEST_FILE = 4 << 30  # bytes: it is read into memory
Attribute = str | int | float | bool | list[Any] | None


class SpanData(msgspec.Struct, frozen=True, kw_only=True):
    """One span. Nanoseconds since 1970, of the clock of the host that made it; ids are hexadecimal."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    begin_ns: int
    end_ns: int
    attributes: dict[str, Attribute]


def read_spans(path: Path) -> list[SpanData]:
    """All spans of a file. Raises InputError where it cannot be read, or is no OTLP with traces."""
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise InputError(f"{path} is larger than 4 GiB; split it")
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    if not content.strip():
        raise InputError(f"{path} is empty")
    try:
        if content.lstrip()[:1] == b"{":
            found = [span for message in _documents(content) for span in _of_json(message)]
        else:
            found = [span for message in _messages(content) for span in spans_of(message)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is no file of OTLP traces, as JSON or as protobuf ({error!r})") from None
    if not found:
        raise InputError(f"{path} holds no span")
    return found


def spans_of(message: bytes) -> list[SpanData]:
    """The spans of one ExportTraceServiceRequest in protobuf. Raises ValueError where it is none."""
    try:
        from google.protobuf.message import DecodeError
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    except ImportError as error:
        raise PackageMissing(say_missing(["opentelemetry"], "reading spans in protobuf")) from error
    try:
        parsed = ExportTraceServiceRequest.FromString(message)
    except DecodeError as error:
        raise ValueError(f"not protobuf of OTLP: {error}") from None
    return [
        SpanData(
            trace_id=span.trace_id.hex(), span_id=span.span_id.hex(), parent_id=span.parent_span_id.hex(),
            name=span.name, begin_ns=span.start_time_unix_nano, end_ns=span.end_time_unix_nano,
            attributes={each.key: _value(each.value) for each in span.attributes},
        )
        for resource in parsed.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]  # fmt: skip


def _documents(content: bytes) -> list[dict[str, Any]]:
    try:
        return [json.loads(content)]
    except json.JSONDecodeError:
        return [json.loads(line) for line in content.splitlines() if line.strip()]


def _messages(content: bytes) -> Iterator[bytes]:
    """Each message behind its length; the whole where the lengths do not fill it exactly."""
    places, at = [], 0
    while at + 4 <= len(content):
        (length,) = struct.unpack_from(">I", content, at)
        places.append((at + 4, at + 4 + length))
        at += 4 + length
    if at == len(content):
        yield from (content[begin:end] for begin, end in places)
    else:
        yield content


def _value(value: Any) -> Attribute:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind) if kind in ("string_value", "int_value", "double_value", "bool_value") else None


def _of_json(message: dict[str, Any]) -> Iterator[SpanData]:
    if "spans" in message:
        yield from _of_flat(message["spans"])
        return
    for resource in message["resourceSpans"]:
        for scope in resource.get("scopeSpans", ()):
            for span in scope.get("spans", ()):
                yield SpanData(
                    trace_id=_hex(span.get("traceId", ""), 32), span_id=_hex(span.get("spanId", ""), 16),
                    parent_id=_hex(span.get("parentSpanId", ""), 16), name=str(span.get("name", "")),
                    begin_ns=int(span["startTimeUnixNano"]), end_ns=int(span["endTimeUnixNano"]),
                    attributes={each["key"]: _json_value(each.get("value", {})) for each in span.get("attributes", ())},
                )  # fmt: skip


def _of_flat(spans: list[dict[str, Any]]) -> Iterator[SpanData]:
    """One list of spans with ISO times and plain attributes, as agent frameworks dump it."""
    for span in spans:
        yield SpanData(
            trace_id=str(span.get("trace_id", "")), span_id=str(span["span_id"]),
            parent_id=str(span.get("parent_span_id") or ""), name=str(span.get("name", "")),
            begin_ns=_iso_ns(span["start_time"]), end_ns=_iso_ns(span["end_time"]),
            attributes=dict(span.get("attributes") or {}),
        )  # fmt: skip


def _iso_ns(text: str) -> int:
    """Without a zone as UTC."""
    when = datetime.fromisoformat(text)
    return round((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() * 1e6) * 1000


def _hex(text: str, digits: int) -> str:
    """OTLP writes ids as hexadecimal; a plain mapping of protobuf to JSON writes them as base64."""
    if not text or len(text) == digits:
        return text.lower()
    return base64.b64decode(text).hex()


def _json_value(value: dict[str, Any]) -> Attribute:
    ((kind, content),) = value.items() or (("none", None),)
    if kind == "intValue":
        return int(content)  # a 64-bit integer is a text in JSON
    if kind == "doubleValue":
        return float(content)
    if kind == "arrayValue":
        return [_json_value(each) for each in content.get("values", ())]
    return content if kind in ("stringValue", "boolValue") else None
