"""A server of known truth, which tells how wrong the client is."""
