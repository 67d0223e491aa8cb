"""What a watch says as Prometheus metrics, so that dashboards mark its findings and alerts can read them."""

import http.server
import re
import threading
from collections.abc import Callable, Iterator, Mapping

from sojourn.diagnosis.statements.means import COUNTERS, GAUGES, HISTOGRAMS
from sojourn.diagnosis.verdict import Finding
from sojourn.interop.sources.pressure import GENERATED, KV_USE, RUNNING, WAITING
from sojourn.interop.sources.registry import SOURCES
from sojourn.interop.sources.sojourn import SOJOURN
from sojourn.live.watch.document import Watch, WatchedServer
from sojourn.metrics.errors import ServerError

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATE, FINDING = "sojourn_watch_state", "sojourn_watch_finding"
HELP = {
    STATE: "State of a watched server, in the label state; always 1.",
    FINDING: "Confidence (0 to 1) of a cause that the watch names for a server, while it stands; by the series that it "
    "was found in.",
}
SERIES = re.compile(r"\b(?:sojourn_|vllm:|sglang:|ray_)\w+")
# A word in the source of an evidence → the families of the catalogue that a watch has in its place.
FAMILIES = {
    GAUGES: (RUNNING, WAITING, KV_USE),
    HISTOGRAMS: ("sojourn_request_ttft_seconds", "sojourn_request_queue_seconds", "sojourn_request_tpot_seconds"),
    COUNTERS: ("sojourn_request_finished_total", GENERATED),
    "requests: ttft": ("sojourn_request_ttft_ledger_seconds_total",),
    "requests: ledger": ("sojourn_request_ledger_seconds_total",),
    "waits": ("sojourn_request_wait_seconds_total",),
    "tpot_seconds": ("sojourn_request_tpot_seconds",),
    "running": (RUNNING, "sojourn_token_scheduled_tokens_total", "sojourn_compute_steps_total"),
    "device_ns": ("sojourn_compute_device_seconds_total",),
    "predicted_ns": ("sojourn_compute_predicted_seconds_total",),
    "phase_flops": ("sojourn_compute_phase_flops_total", "sojourn_compute_phase_moved_bytes_total"),
}


def page(watch: Watch) -> bytes:
    """GET /metrics of a watch. `instance` and `job` are those of the watched server: scrape it with honor_labels."""
    lines = []
    for name, samples in ((STATE, _states(watch)), (FINDING, _findings(watch))):
        lines += [f"# HELP {name} {HELP[name]}", f"# TYPE {name} gauge"]
        for labels, value in samples:
            written = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items() if text)
            lines.append(f"{name}{{{written}}} {value:g}")
    return ("\n".join(lines) + "\n").encode()


def _states(watch: Watch) -> Iterator[tuple[Mapping[str, str], float]]:
    for server in watch.servers:
        yield _target(server) | {"state": server.state}, 1.0


def _findings(watch: Watch) -> Iterator[tuple[Mapping[str, str], float]]:
    for server in watch.servers:
        for finding in server.findings:
            labels = {"finding": finding.key or finding.symptom, "title": finding.title, "object": finding.object}
            labels["series"] = ", ".join(_series(server, finding)) or server.reads
            yield _target(server) | labels, finding.confidence


def _series(server: WatchedServer, finding: Finding) -> list[str]:
    """The families, as this server's engine names them, that the evidence for a finding was read from."""
    engine = next((each for each in SOURCES if each.key == server.source), SOJOURN)
    # A newer name that counts with a label only is on few pages: the plain one is on all
    theirs = {item.ours: min((terms[0] for terms in item.theirs), key=lambda term: bool(term.where)).name
              for item in reversed(engine.translations)}  # fmt: skip
    theirs |= {} if engine is not SOJOURN else {name: name for families in FAMILIES.values() for name in families}
    found: list[str] = []
    for source in (each.source for each in finding.evidence if each.supports):
        known = (name for word, families in FAMILIES.items() if word in source for name in families)
        found += [*SERIES.findall(source), *(theirs[name] for name in known if name in theirs)]
    return list(dict.fromkeys(found))


def _target(server: WatchedServer) -> dict[str, str]:
    """A Prometheus' server is named `instance (job)`, another one by its address."""
    instance, _, job = server.name.removesuffix(")").partition(" (")
    return {"instance": re.sub("^https?://", "", instance), "job": job}


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def serve(port: int, watch: Callable[[], Watch]) -> http.server.ThreadingHTTPServer:
    """Answers GET /metrics on 127.0.0.1 in a thread of its own. Raises ServerError where the port is taken."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path.partition("?")[0] == "/metrics"
            body = page(watch()) if found else b"see /metrics\n"
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    try:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise ServerError(
            f"port {port} of 127.0.0.1 cannot be used ({error.strerror}); choose another with --metrics-port"
        ) from None
    threading.Thread(target=server.serve_forever, name="watch metrics", daemon=True).start()
    return server
