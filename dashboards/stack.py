"""The files beside the dashboards that make Prometheus and Grafana find each other: `docker compose up`, nothing else.

All lie flat in one folder, so that it can be copied anywhere.
"""

COMPOSE = """\
# Prometheus and Grafana beside a Sojourn server that listens on port 8000 of this host:
#   docker compose -f compose.yaml up
# Grafana then shows the dashboards on http://127.0.0.1:3000, without a login, to this host only.
# On Linux a container cannot reach the host's 127.0.0.1: start the server on Docker's bridge instead,
#   sojourn serve ... --host 172.17.0.1
# (`docker network inspect bridge` tells the address if yours is another).
services:
  prometheus:
    image: prom/prometheus:v3.5.0
    command: ["--config.file=/etc/prometheus/prometheus.yaml", "--storage.tsdb.retention.time=15d"]
    extra_hosts: ["host.docker.internal:host-gateway"]
    ports: ["127.0.0.1:9090:9090"]
    volumes:
      - ./prometheus.yaml:/etc/prometheus/prometheus.yaml:ro
      - ./rules.yaml:/etc/prometheus/rules.yaml:ro
      - prometheus-data:/prometheus
  grafana:
    image: grafana/grafana:12.0.2
    depends_on: [prometheus]
    environment:
      GF_AUTH_ANONYMOUS_ENABLED: "true"
      GF_AUTH_ANONYMOUS_ORG_ROLE: Viewer
      GF_AUTH_BASIC_ENABLED: "false"
      GF_AUTH_DISABLE_LOGIN_FORM: "true"
      GF_ANALYTICS_REPORTING_ENABLED: "false"
      GF_ANALYTICS_CHECK_FOR_UPDATES: "false"
      GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH: /etc/sojourn/sojourn-request.json
    ports: ["127.0.0.1:3000:3000"]
    volumes:
      - ./datasource.yaml:/etc/grafana/provisioning/datasources/sojourn.yaml:ro
      - ./provider.yaml:/etc/grafana/provisioning/dashboards/sojourn.yaml:ro
      - ./:/etc/sojourn:ro
volumes:
  prometheus-data: {}
"""

PROMETHEUS = """\
global:
  scrape_interval: 5s
  evaluation_interval: 15s
rule_files: [rules.yaml]
scrape_configs:
  - job_name: sojourn
    static_configs:
      - targets: ["host.docker.internal:8000"]
"""

DATASOURCE = """\
apiVersion: 1
datasources:
  - name: Prometheus
    uid: sojourn-prometheus
    type: prometheus
    access: proxy
    url: http://prometheus:9090
    isDefault: true
    jsonData:
      timeInterval: 5s  # the scrape interval: $__rate_interval is made from it
"""

PROVIDER = """\
apiVersion: 1
providers:
  - name: sojourn
    folder: Sojourn
    type: file
    options:
      path: /etc/sojourn  # only its *.json are dashboards
"""

FILES: dict[str, str] = {
    "compose.yaml": COMPOSE,
    "prometheus.yaml": PROMETHEUS,
    "datasource.yaml": DATASOURCE,
    "provider.yaml": PROVIDER,
}
