"""Causes: one function each, over facts of a run."""
