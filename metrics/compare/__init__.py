"""Whether one run is worse than another."""
