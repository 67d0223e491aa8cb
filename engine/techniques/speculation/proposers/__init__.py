"""Proposers of drafts: tokens that a later step of the model verifies (docs/speculation.md)."""
