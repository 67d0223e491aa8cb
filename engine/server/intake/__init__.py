"""The way of a call from its head to the core: one list of steps, each of which may refuse it."""
