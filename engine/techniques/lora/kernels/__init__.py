"""Low-rank deltas of several adapters behind linear layers: what multiplies them, on each device."""
