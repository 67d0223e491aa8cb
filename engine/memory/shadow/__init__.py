"""An infinite cache beside the real one: what became of every prompt token at its first query."""
