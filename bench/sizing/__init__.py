"""The figures of `sojourn size` beside those that others state, and beside recorded servers: docs/results/sizing.md."""
