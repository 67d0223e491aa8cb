"""Summaries of other tools' benchmarks, as figures with their definitions."""
