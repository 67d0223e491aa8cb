"""Text to ids, ids to logits, logits to ids, ids to text."""
