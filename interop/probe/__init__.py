"""What `sojourn-probe` recorded inside a foreign server, as a run directory of ours."""
