"""The bytes of each request."""
