"""The Messages API of Anthropic: its bodies, its events and its errors, in front of the same calls."""
