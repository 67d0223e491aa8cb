"""What a server promises while it is maltreated, measured on real processes. `python -m bench.torture` runs all."""
