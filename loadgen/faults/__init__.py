"""Planted faults with a known truth: their cases, the faults of client and machine, and the runner of them all."""
