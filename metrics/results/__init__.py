"""A run's results in one value."""
