"""Logits to ids: penalties, truncation, draws and log-probabilities."""
