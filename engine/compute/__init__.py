"""Kernels and attention backends. Knows no request."""
