"""Predictions on a machine that is busy on purpose: recorded pairs, and how often their intervals hold."""
