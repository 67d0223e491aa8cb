"""Ended requests → OpenTelemetry, over OTLP/HTTP: spans, made after the fact in a thread of their own, and histograms.

A trace is kept if its caller sampled it, or, without a caller, by its id (`spans.is_sampled`); and always if the
request missed an objective or failed. The queue is bounded: what does not fit is dropped and counted, and no request
waits. BatchSpanProcessor is not used: it drops in silence, and spans would have to be made on the way of the request.
"""

import logging
import random
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from sojourn.interop.exported.otlp_metrics import Observation, OtlpMetrics, observation
from sojourn.interop.exported.request_outcome import Bounds, bounds_of, latencies_ns, met
from sojourn.interop.exported.spans import Parent, Span, account_spans, is_sampled, moments, parent_of, root_span
from sojourn.metrics.errors import ServerError
from sojourn.metrics.installed import say_missing
from sojourn.metrics.records import RequestRecord

EXPORT_SECONDS = 1.0
QUEUE_REQUESTS = 2048  # that may wait for the exporter
BATCH_REQUESTS = 64  # of one export: some 700 spans
CLOSE_SECONDS = 3.0


log = logging.getLogger(__name__)
_AWAY = "takes no traces: they are lost, and counted in sojourn_telemetry_trace_exports_total"


class Tracer:
    """Owns the exporter's thread. `observe` is cheap and never blocks.

    `decisions` counts why a request was kept or left out; `exports` what became of the traces: exported, dropped (the
    queue was full), refused (the collector said no, or was not there).
    """

    def __init__(
        self,
        endpoint: str,
        model_name: str,
        ratio: float,
        objectives: Bounds,
        wall_offset_ns: int,
        rng: random.Random | None = None,
        capacity: int = QUEUE_REQUESTS,
        metrics: bool = False,
    ):
        """`endpoint` is the collector's base address. `metrics`: send the histograms, too. `wall_offset_ns` brings the
        monotonic clock to that of the wall.

        Raises ServerError if OpenTelemetry's SDK is not installed.
        """
        self._model_name = model_name
        self._ratio = ratio
        self._objectives = objectives
        self._rng = rng or random.SystemRandom()
        self._capacity = capacity
        self._endpoint = endpoint
        self._is_accepted = True  # by the collector, as far as we know
        self._otlp = _Otlp(endpoint, wall_offset_ns, metrics)
        self._ended: deque[Observation] = deque()  # for the histograms: every request, whatever is sampled
        self._pending: deque[tuple[RequestRecord, Mapping[str, Any], Parent | None, int, list[str]]] = deque()
        self._closing = threading.Event()
        self.decisions = {"head": 0, "objective": 0, "error": 0, "left_out": 0}
        self.exports = {"exported": 0, "dropped": 0, "refused": 0}
        self._thread = threading.Thread(target=self._run, name="tracer", daemon=True)
        self._thread.start()

    def observe(self, request: RequestRecord, attributes: Mapping[str, Any]) -> None:
        """Takes an ended request. `attributes`: those of its options."""
        if self._otlp.metrics is not None:
            self._ended.append(observation(request, self._model_name, attributes))
        parent = parent_of(request.traceparent)
        trace_id = parent.trace_id if parent is not None else self._rng.getrandbits(128) or 1
        verdicts = met(request, latencies_ns(request), bounds_of(request.klass, self._objectives))
        missed = [name for name, is_met in verdicts.items() if not is_met]
        if parent.is_sampled if parent is not None else is_sampled(trace_id, self._ratio):
            decision = "head"
        elif request.error is not None:
            decision = "error"
        else:
            decision = "objective" if missed else "left_out"
        self.decisions[decision] += 1
        if decision == "left_out":
            return
        if len(self._pending) >= self._capacity:
            self.exports["dropped"] += 1
        else:
            self._pending.append((request, attributes, parent, trace_id, missed))

    def close(self) -> None:
        """Sends the rest, for as long as CLOSE_SECONDS; what is left then is dropped."""
        self._closing.set()
        self._thread.join(CLOSE_SECONDS)
        self._otlp.stop()
        self.exports["dropped"] += len(self._pending)
        self._pending.clear()

    def _run(self) -> None:
        while not self._closing.wait(EXPORT_SECONDS):
            self._flush()
        self._flush()

    def _flush(self) -> None:
        while self._ended and self._otlp.metrics is not None:
            self._otlp.metrics.record(self._ended.popleft())
        while self._pending:
            batch = [self._pending.popleft() for _ in range(min(BATCH_REQUESTS, len(self._pending)))]
            spans: list[Any] = []
            for request, attributes, parent, trace_id, missed in batch:
                root = root_span(request, self._model_name, attributes)
                if missed:
                    root.attributes["sojourn.missed_objectives"] = missed
                spans += self._otlp.trace(root, account_spans(request), request, parent, trace_id)
            accepted = self._otlp.export(spans)
            self.exports["exported" if accepted else "refused"] += len(batch)
            if accepted != self._is_accepted:
                log.warning("%s %s", self._endpoint, "takes traces again" if accepted else _AWAY)
            self._is_accepted = accepted


class _Otlp:
    """OpenTelemetry's exporter, and our spans in its types. Only this class needs the package."""

    def __init__(self, endpoint: str, wall_offset_ns: int, metrics: bool):
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk import trace as sdk
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        except ImportError as error:
            raise ServerError(say_missing(["opentelemetry"], "otlp_endpoint")) from error
        self._api, self._sdk = trace, sdk
        self._offset_ns = wall_offset_ns
        self._ids = random.Random()
        self._resource = Resource.create({"service.name": "sojourn"})
        self._scope = InstrumentationScope("sojourn")
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)  # we say it once; it, at every attempt
        address = endpoint.rstrip("/").removesuffix("/v1/traces")
        self._exporter = OTLPSpanExporter(endpoint=f"{address}/v1/traces", timeout=5)
        self.metrics = OtlpMetrics(address, self._resource) if metrics else None

    def trace(
        self,
        root: Span,
        children: Sequence[Span],
        request: RequestRecord,
        parent: Parent | None,
        trace_id: int,
    ) -> list[Any]:
        """The spans of one request, the root first."""
        api, sdk = self._api, self._sdk
        above = self._context(trace_id, parent.span_id, remote=True) if parent is not None else None
        context = self._context(trace_id, self._ids.getrandbits(64) or 1)
        status = api.Status(api.StatusCode.ERROR, request.error) if request.error is not None else api.Status()
        events = [sdk.Event(name, timestamp=ns + self._offset_ns) for name, ns in moments(request)]
        spans = [self._span(root, context, above, api.SpanKind.SERVER, events, status)]
        for child in children:
            own = self._context(trace_id, self._ids.getrandbits(64) or 1)
            spans.append(self._span(child, own, context, api.SpanKind.INTERNAL, (), api.Status()))
        return spans

    def export(self, spans: Sequence[Any]) -> bool:
        """Whether the collector took them."""
        return self._exporter.export(spans).name == "SUCCESS"

    def stop(self) -> None:
        self._exporter.shutdown()
        if self.metrics is not None:
            self.metrics.stop(CLOSE_SECONDS)

    def _context(self, trace_id: int, span_id: int, remote: bool = False) -> Any:
        return self._api.SpanContext(trace_id, span_id, is_remote=remote, trace_flags=self._api.TraceFlags.SAMPLED)

    def _span(self, span: Span, context: Any, parent: Any, kind: Any, events: Sequence[Any], status: Any) -> Any:
        return self._sdk.ReadableSpan(
            name=span.name,
            context=context,
            parent=parent,
            resource=self._resource,
            attributes=span.attributes,
            events=events,
            kind=kind,
            status=status,
            start_time=span.begin_ns + self._offset_ns,
            end_time=span.end_ns + self._offset_ns,
            instrumentation_scope=self._scope,
        )
