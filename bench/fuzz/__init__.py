"""Coverage-guided fuzzing of whatever reads foreign bytes. `python -m bench.fuzz --minutes 60` runs all targets."""
