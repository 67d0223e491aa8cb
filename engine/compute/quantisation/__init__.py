"""Quantised matrices: one form for what every checkpoint format holds, and the kernels that multiply by it."""
