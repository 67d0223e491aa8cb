"""Logs, pages of /metrics, flags, model configurations and sensors' texts."""
