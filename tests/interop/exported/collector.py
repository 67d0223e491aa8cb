"""A scripted OpenTelemetry collector."""

import http.server
import threading

from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2


class Collector:
    """A scripted OTLP/HTTP collector. `spans` are those that came; `metrics` the last state of each, by name."""

    def __init__(self, status: int = 200):
        collector = self
        self.spans: list = []
        self.metrics: dict = {}
        self.paths: set[str] = set()
        self.posts = 0

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.posts += 1
                collector.paths.add(self.path)
                if status == 200:
                    collector.take_metrics(body) if "metrics" in self.path else collector.take(body)
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *arguments):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def take(self, body: bytes) -> None:
        message = trace_service_pb2.ExportTraceServiceRequest.FromString(body)
        for resource in message.resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans

    def take_metrics(self, body: bytes) -> None:
        message = metrics_service_pb2.ExportMetricsServiceRequest.FromString(body)
        for resource in message.resource_metrics:
            for scope in resource.scope_metrics:
                self.metrics |= {metric.name: metric for metric in scope.metrics}

    @property
    def roots(self) -> list:
        return [span for span in self.spans if span.kind == span.SPAN_KIND_SERVER]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def attributes(span) -> dict:
    """A span's attributes as plain values."""
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in span.attributes}
