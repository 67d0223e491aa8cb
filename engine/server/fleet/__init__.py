"""What this server sends to a router in front of several (docs/fleet.md)."""
