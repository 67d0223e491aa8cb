"""The hot path: it sends requests and stamps bytes, and parses nothing."""
