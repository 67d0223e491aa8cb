"""Prefix outcomes and miss-ratio curves."""
