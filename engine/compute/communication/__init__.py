"""Ranks that compute one model together: who holds what, and how they exchange tensors."""
