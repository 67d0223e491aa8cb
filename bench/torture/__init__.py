"""The guarantees of a server under fault injection, measured on real processes. `python -m bench.torture` runs all."""
