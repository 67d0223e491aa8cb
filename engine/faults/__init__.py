"""Faults planted on purpose, for experiments with a known truth. Nothing here is imported without `faults`."""
