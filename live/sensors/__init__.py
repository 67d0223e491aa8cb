"""Sensors of GPUs and of the host, read beside a server while it is watched, loaded or recorded."""
