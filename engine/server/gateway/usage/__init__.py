"""Usage records of a server: written before a call reaches the core, and before its answer is complete."""
