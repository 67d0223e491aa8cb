"""Replays beside real runs of the changed setting."""
