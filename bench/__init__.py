"""Benchmarks of the engine and of the load generator. README.md lists them with their commands."""
