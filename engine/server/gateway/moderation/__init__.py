"""Moderation: checks of what a client sends before the core computes it, and of what the model writes."""
