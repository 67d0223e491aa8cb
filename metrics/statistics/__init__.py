"""Statistics that know nothing of Sojourn."""
