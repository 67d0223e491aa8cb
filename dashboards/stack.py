"""The files by which Prometheus and Grafana find the servers and each other, with Docker and without it."""

import ipaddress
from dataclasses import dataclass
from typing import Any

JOB = "llm"
SCRAPE_SECONDS = 5
PROMETHEUS_IMAGE, GRAFANA_IMAGE = "prom/prometheus:v3.5.0", "grafana/grafana:12.0.2"
HOST = "host.docker.internal"  # this machine, as a container behind a bridge sees it
HOME = "/etc/sojourn/sojourn-saturation.json"


@dataclass(frozen=True, slots=True)
class Stack:
    """Which servers are scraped, and on which ports of 127.0.0.1 the pages are.

    With `host_network` (Linux) the containers share this machine's network, so that they reach servers on 127.0.0.1.
    Docker Desktop has none: there 127.0.0.1 becomes `host.docker.internal`.
    """

    targets: tuple[str, ...] = ("127.0.0.1:8000",)
    prometheus_port: int = 9090
    grafana_port: int = 3000
    host_network: bool = True
    watch_port: int = 0  # of a `sojourn watch` on this host; 0: none

    def files(self) -> dict[str, dict[str, Any]]:
        """File name → content."""
        return {
            "prometheus.yaml": self.prometheus(),
            "compose.yaml": self.compose(),
            "datasource.yaml": self.datasource(),
            "provider.yaml": PROVIDER,
        }

    def prometheus(self) -> dict[str, Any]:
        """Rules are evaluated as often as targets are scraped: the neutral names are recorded by rules."""
        targets = [target if self.host_network else _from_a_bridge(target) for target in self.targets]
        every = f"{SCRAPE_SECONDS}s"
        jobs: list[dict[str, Any]] = [{"job_name": JOB, "static_configs": [{"targets": targets}]}]
        if self.watch_port:  # its series carry the labels of the servers that it watches
            own = [{"targets": [f"127.0.0.1:{self.watch_port}"]}]
            jobs.append({"job_name": "sojourn-watch", "honor_labels": True, "static_configs": own})
        return {
            "global": {"scrape_interval": every, "evaluation_interval": every},
            "rule_files": ["rules.yaml"],
            "scrape_configs": jobs,
        }

    def datasource(self) -> dict[str, Any]:
        """`timeInterval` is the scrape interval, from which Grafana makes $__rate_interval."""
        host = f"127.0.0.1:{self.prometheus_port}" if self.host_network else "prometheus:9090"
        source = {
            "name": "Prometheus", "uid": "sojourn-prometheus", "type": "prometheus", "access": "proxy",
            "url": f"http://{host}", "isDefault": True, "jsonData": {"timeInterval": f"{SCRAPE_SECONDS}s"},
        }  # fmt: skip
        return {"apiVersion": 1, "datasources": [source]}

    def compose(self) -> dict[str, Any]:
        """Both without a login, for this machine only."""
        prometheus: dict[str, Any] = {
            "image": PROMETHEUS_IMAGE,
            "command": [
                "--config.file=/etc/prometheus/prometheus.yaml", "--storage.tsdb.path=/prometheus",
                "--storage.tsdb.retention.time=15d",
            ],
            "volumes": [
                "./prometheus.yaml:/etc/prometheus/prometheus.yaml:ro", "./rules.yaml:/etc/prometheus/rules.yaml:ro",
                "prometheus-data:/prometheus",
            ],
        }  # fmt: skip
        grafana: dict[str, Any] = {
            "image": GRAFANA_IMAGE,
            "depends_on": ["prometheus"],
            "environment": {
                "GF_AUTH_ANONYMOUS_ENABLED": "true",
                "GF_AUTH_ANONYMOUS_ORG_ROLE": "Viewer",
                "GF_AUTH_BASIC_ENABLED": "false",
                "GF_AUTH_DISABLE_LOGIN_FORM": "true",
                "GF_ANALYTICS_REPORTING_ENABLED": "false",
                "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
                "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH": HOME,
            },
            "volumes": [
                "./datasource.yaml:/etc/grafana/provisioning/datasources/sojourn.yaml:ro",
                "./provider.yaml:/etc/grafana/provisioning/dashboards/sojourn.yaml:ro",
                "./:/etc/sojourn:ro",
            ],
        }
        if self.host_network:
            prometheus["network_mode"] = grafana["network_mode"] = "host"
            prometheus["command"].append(f"--web.listen-address=127.0.0.1:{self.prometheus_port}")
            grafana["environment"] |= {
                "GF_SERVER_HTTP_ADDR": "127.0.0.1", "GF_SERVER_HTTP_PORT": str(self.grafana_port),
            }  # fmt: skip
        else:
            prometheus["ports"] = [f"127.0.0.1:{self.prometheus_port}:9090"]
            prometheus["extra_hosts"] = [f"{HOST}:host-gateway"]
            grafana["ports"] = [f"127.0.0.1:{self.grafana_port}:3000"]
        return {"services": {"prometheus": prometheus, "grafana": grafana}, "volumes": {"prometheus-data": {}}}


PROVIDER = {
    "apiVersion": 1,
    # of the folder only *.json are dashboards
    "providers": [{"name": "sojourn", "folder": "Sojourn", "type": "file", "options": {"path": "/etc/sojourn"}}],
}


def checked_target(text: str) -> str:
    """`host:port` of a target that was given so or as an http address. Raises ValueError with a sentence."""
    target = text.removeprefix("http://").rstrip("/")
    host, _, port = target.rpartition(":")
    if not host or "/" in target or not port.isdigit() or not 0 < int(port) < 65_536:
        raise ValueError(f"target {text!r} is no host:port; give the address of a server, such as 127.0.0.1:8000")
    return target


def _from_a_bridge(target: str) -> str:
    host, _, port = target.rpartition(":")
    try:
        is_here = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_here = host == "localhost"
    return f"{HOST}:{port}" if is_here else target
