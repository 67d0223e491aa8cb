"""What dashboards and rules ask a Prometheus for, beside what a server exports."""
