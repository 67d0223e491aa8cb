"""A diagnosis and the results of a run as text."""
