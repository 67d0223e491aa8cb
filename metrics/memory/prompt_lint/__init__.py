"""Prompts that a prefix cache cannot use, and texts that cost many tokens."""
