"""The server's histograms in the words of OpenTelemetry's GenAI conventions, sent to a collector over OTLP/HTTP.

Names, units and buckets are those of `open-telemetry/semantic-conventions-genai` v0.1.0 (status: development): request
duration, time to first token, time per output token. The SDK's own reader sends them, cumulative since the start.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sojourn.interop.exported.request_outcome import SERVED, latencies_ns, outcome
from sojourn.metrics.records import RequestRecord

EXPORT_MS = 10_000
TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Histogram:
    name: str
    meaning: str
    bounds_s: tuple[float, ...]


DURATION = Histogram(
    "gen_ai.server.request.duration", "From arrival to the last byte.",
    (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
)  # fmt: skip
TPOT = Histogram(
    "gen_ai.server.time_per_output_token", "Per output token after the first, of successful responses.",
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)  # fmt: skip
TTFT = Histogram(
    "gen_ai.server.time_to_first_token", "From arrival to the first text, of successful responses.",
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)  # fmt: skip
HISTOGRAMS = (DURATION, TPOT, TTFT)
Observation = tuple[dict[str, float], dict[str, str]]  # seconds by histogram, attributes


def observation(request: RequestRecord, model_name: str, options: Mapping[str, Any]) -> Observation:
    """What an ended request adds to the histograms. A client that went away gets `error.type` = aborted."""
    ended = outcome(request)
    seconds = {DURATION.name: ((request.written_ns or request.finished_ns) - request.arrived_ns) / 1e9}
    attributes = {
        "gen_ai.operation.name": str(options.get("gen_ai.operation.name", "chat")),
        "gen_ai.provider.name": "sojourn",
        "gen_ai.request.model": model_name,
        "gen_ai.response.model": model_name,
    }
    if ended not in SERVED:
        attributes["error.type"] = "aborted" if ended == "abort" else "server_error"
        return seconds, attributes
    latencies = latencies_ns(request)
    for name, histogram in (("ttft_ms", TTFT), ("tpot_ms", TPOT)):
        if name in latencies:
            seconds[histogram.name] = latencies[name] / 1e9
    return seconds, attributes


class OtlpMetrics:
    """Owns the SDK's meters and the thread that sends them. Only this class needs the package."""

    def __init__(self, address: str, resource: Any):
        """`address`: of the collector, without a path. Raises ImportError if OpenTelemetry's SDK is not installed."""
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

        exporter = OTLPMetricExporter(endpoint=f"{address}/v1/metrics", timeout=TIMEOUT_S)
        reader = PeriodicExportingMetricReader(exporter, EXPORT_MS)
        self._provider = MeterProvider([reader], resource, shutdown_on_exit=False)
        meter = self._provider.get_meter("sojourn")
        self._histograms = {
            each.name: meter.create_histogram(
                each.name, "s", each.meaning, explicit_bucket_boundaries_advisory=each.bounds_s
            )
            for each in HISTOGRAMS
        }

    def record(self, observed: Observation) -> None:
        seconds, attributes = observed
        for name, value in seconds.items():
            self._histograms[name].record(value, attributes)

    def stop(self, timeout_s: float) -> None:
        """Sends what is left, for as long as `timeout_s`."""
        self._provider.shutdown(timeout_s * 1000)
