"""Attention over a paged KV cache: one interface, three backends."""
