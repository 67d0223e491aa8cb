"""A reference server, which tells how wrong the client is."""
