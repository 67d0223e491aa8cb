"""Load generators beside each other and beside the truth."""
