"""What a router in front of several servers asks of this one (docs/fleet.md)."""
