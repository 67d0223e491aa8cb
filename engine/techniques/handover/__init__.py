"""KV blocks between servers: leases of a prefill server, transports, and the peers of a decode server."""
