"""Logits to ids: penalties, truncation, sampling and log-probabilities."""
