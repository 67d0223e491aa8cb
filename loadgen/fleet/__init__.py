"""Several of our servers behind a router that exists (docs/fleet.md)."""
