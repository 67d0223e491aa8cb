"""Verbs of the command line that have a file of their own; sojourn.py registers them."""
