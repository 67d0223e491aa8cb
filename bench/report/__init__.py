"""What benchmarks report: accounts, ceilings, tables."""
