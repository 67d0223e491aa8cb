"""Grafana dashboards, Prometheus rules and a compose file, built from the metric catalogue."""
