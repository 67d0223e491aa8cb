"""Makes quantised checkpoints of dense ones, and measures what the rounding of weights changes."""
