"""Tables of a run, by lifecycle."""
