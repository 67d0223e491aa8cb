"""Records in the formats of other tools: Prometheus, OpenTelemetry, Perfetto, vLLM."""
